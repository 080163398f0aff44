// How a compiled kernel makes itself known to the driver. The build script writes one Registration a kernel.
#pragma once
#include <utility>

namespace simt {

struct Kernel {
  const char* name;
  unsigned max_threads;  // its __launch_bounds__
  unsigned arguments;
  const unsigned* sizes;  // of the arguments, in bytes
  const bool* pointers;   // which arguments are
  void (*run)(void* const* arguments);
  const Kernel* next;
};

// The list of all kernels (launch.cpp).
extern const Kernel* kernels;

template <class T>
constexpr bool is_pointer = false;
template <class T>
constexpr bool is_pointer<T*> = true;

template <auto Function>
struct Thunk;
template <class... P, void (*Function)(P...)>
struct Thunk<Function> {
  static constexpr unsigned count = sizeof...(P);
  static constexpr unsigned sizes[] = {sizeof(P)..., 0};
  static constexpr bool pointers[] = {is_pointer<P>..., false};
  static void run(void* const* arguments) { call(arguments, std::make_index_sequence<count>()); }

 private:
  template <std::size_t... I>
  static void call([[maybe_unused]] void* const* arguments, std::index_sequence<I...>) {
    Function(*(P*)arguments[I]...);
  }
};

template <auto Function>
struct Registration {
  Kernel kernel;
  Registration(const char* name, unsigned max_threads)
      : kernel{name,
               max_threads,
               Thunk<Function>::count,
               Thunk<Function>::sizes,
               Thunk<Function>::pointers,
               Thunk<Function>::run,
               kernels} {
    kernels = &kernel;
  }
};

}  // namespace simt
