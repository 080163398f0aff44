/* The part of <stdbool.h> that triton_abi.h needs, so that bindgen reads no system header. */
#pragma once
#define bool _Bool
