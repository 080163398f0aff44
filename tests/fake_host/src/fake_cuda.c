/* A stand-in for the CUDA driver with one device whose memory is the host's: see cuda.rs. */
#include <string.h>

#define DEVICE_BIT (1ull << 62)

static int context, depth, copies, next_error;

int fake_cuda_copies(void) { return copies; }
void fake_cuda_fail_next(int error) { next_error = error; }

static int copy(void* to, const void* from, size_t size) {
  int error = next_error;
  next_error = 0;
  if (error) return error;
  if (depth != 1) return 201; /* CUDA_ERROR_INVALID_CONTEXT */
  memcpy(to, from, size);
  copies++;
  return 0;
}

int cuInit(unsigned flags) { return flags ? 1 : 0; }
int cuDeviceGet(int* device, int number) {
  *device = number;
  return number ? 101 : 0; /* CUDA_ERROR_INVALID_DEVICE */
}
int cuDevicePrimaryCtxRetain(void** out, int device) {
  *out = &context;
  return device;
}
int cuCtxPushCurrent_v2(void* pushed) {
  depth++;
  return pushed == &context ? 0 : 201;
}
int cuCtxPopCurrent_v2(void** popped) {
  *popped = &context;
  depth--;
  return 0;
}
int cuCtxSynchronize(void) { return 0; }
int cuMemcpyHtoD_v2(unsigned long long to, const void* from, size_t size) {
  if (!(to & DEVICE_BIT)) return 1;
  return copy((void*)(to & ~DEVICE_BIT), from, size);
}
int cuMemcpyDtoH_v2(void* to, unsigned long long from, size_t size) {
  if (!(from & DEVICE_BIT)) return 1;
  return copy(to, (const void*)(from & ~DEVICE_BIT), size);
}
int cuGetErrorName(int error, const char** name) {
  *name = error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OTHER";
  return 0;
}
