/// stub
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truncation {
    Right,
    Left,
    Error,
}
