/* The part of <stddef.h> that triton_abi.h needs, so that bindgen reads no system header. */
#pragma once
typedef __SIZE_TYPE__ size_t;
#define NULL ((void*)0)
