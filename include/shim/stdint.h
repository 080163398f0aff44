/* The part of <stdint.h> that triton_abi.h needs, so that bindgen reads no system header. */
#pragma once
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
