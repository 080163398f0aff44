//! Every CUDA kernel against plain loops in f64, on random shapes and in memory that holds NaN: on the software device, or
//! with `TRITON_RUST_REAL_GPU=1` and `--skip software::` on a real card.

mod attention;
mod gpu;
mod heads;
mod rows;

extern crate fake_host as _;

use gpu::Random;

/// The same checks with threads in other orders, which only the software device can do. Small: an order shows a missing
/// barrier at any size.
mod software {
    use super::{Random, attention, heads, rows};
    use cuda_device::Order;

    #[test]
    fn no_kernel_depends_on_the_order_of_threads() {
        let device = cuda_device::exclusive();
        for order in [Order::Reverse, Order::Random(1), Order::Random(2)] {
            device.set_order(order);
            let random = &mut Random::new(7);
            rows::check_all(random, 40, &[32, 264, 1032]);
            attention::check_all(random, 150, 4);
            heads::check_all(random, 60, 8, &[32, 264]);
        }
    }
}

#[test]
fn rows_of_random_shapes() {
    let _device = cuda_device::shared();
    rows::check_all(&mut Random::new(1), 200, &[32, 64, 96, 256, 264, 384, 512, 768, 1024, 1032, 2048]);
    rows::check_all(&mut Random::new(2), 700, &[32, 128]);
}

#[test]
fn attention_of_random_shapes() {
    let _device = cuda_device::shared();
    let random = &mut Random::new(3);
    attention::check_all(random, 700, 40);
    attention::check_all(random, 513, 2);
    attention::check_all(random, 1, 1);
}

#[test]
fn heads_of_random_shapes() {
    let _device = cuda_device::shared();
    heads::check_all(&mut Random::new(4), 700, 40, &[32, 384, 1024]);
    heads::check_all(&mut Random::new(5), 1, 1, &[8, 768]);
}
