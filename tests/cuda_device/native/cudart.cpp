// The part of the CUDA runtime that tritonserver calls, on the stand-in driver: preloaded into the server, it makes
// KIND_GPU instances, GPU memory pools and pinned memory work there. What the server can do without is refused.
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#include <mutex>

#include "extension.h"

extern "C" {
int cuInit(unsigned);
int cuDeviceGetCount(int*);
int cuDeviceGetAttribute(int*, int, int);
int cuDeviceGetName(char*, int, int);
int cuDeviceTotalMem_v2(size_t*, int);
int cuDeviceGetPCIBusId(char*, int, int);
int cuDeviceCanAccessPeer(int*, int, int);
int cuDevicePrimaryCtxRetain(void**, int);
int cuCtxSetCurrent(void*);
int cuCtxSynchronize();
int cuCtxGetStreamPriorityRange(int*, int*);
int cuMemGetInfo_v2(size_t*, size_t*);
int cuMemAlloc_v2(uint64_t*, size_t);
int cuMemFree_v2(uint64_t);
int cuMemHostAlloc(void**, size_t, unsigned);
int cuMemFreeHost(void*);
int cuMemcpy(uint64_t, uint64_t, size_t);
int cuMemcpyAsync(uint64_t, uint64_t, size_t, void*);
int cuMemsetD8_v2(uint64_t, unsigned char, size_t);
int cuStreamCreate(void**, unsigned);
int cuStreamDestroy_v2(void*);
int cuStreamSynchronize(void*);
int cuStreamGetFlags(void*, unsigned*);
int cuLaunchHostFunc(void*, void (*)(void*), void*);
int cuGetErrorName(int, const char**);
int cuGetErrorString(int, const char**);
}

namespace {

thread_local int current = 0;
thread_local int last_error = 0;

int keep(int code) {
  if (code) last_error = code;
  return code;
}

// The runtime makes a device's primary context when it is first used, and keeps it.
int use(int device) {
  static std::mutex mutex;
  static void* contexts[16] = {};
  if (int code = cuInit(0)) return code;
  int count;
  if (int code = cuDeviceGetCount(&count)) return code;
  if (device < 0 || device >= count || device >= 16) return 101;
  std::lock_guard lock(mutex);
  if (!contexts[device])
    if (int code = cuDevicePrimaryCtxRetain(&contexts[device], device)) return code;
  return cuCtxSetCurrent(contexts[device]);
}

// How cudaDeviceProp begins (CUDA 12); what follows are limits of textures and surfaces, and newer properties.
struct Properties {
  char name[256];
  char uuid[16];
  char luid[8];
  unsigned luid_node_mask;
  size_t total_memory;
  size_t shared_per_block;
  int registers_per_block, warp;
  size_t pitch;
  int threads_per_block, block_dim[3], grid_dim[3], clock;
  size_t constant_memory;
  int major, minor;
  size_t texture_alignment, texture_pitch_alignment;
  int overlap, multiprocessors, timeout, integrated, maps_host_memory, compute_mode;
};
static_assert(offsetof(Properties, total_memory) == 288 && offsetof(Properties, major) == 360);
constexpr size_t kPropertiesBytes = 1032;

int properties(char* out, int device) {
  int count = 0;
  if (int code = cuInit(0)) return code;
  if (int code = cuDeviceGetCount(&count)) return code;
  if (device < 0 || device >= count) return 101;
  memset(out, 0, kPropertiesBytes);
  Properties known = {};
  cuDeviceGetName(known.name, sizeof known.name, device);
  cuDeviceTotalMem_v2(&known.total_memory, device);
  struct {
    int attribute, *value;
  } values[] = {{1, &known.threads_per_block}, {2, &known.block_dim[0]}, {3, &known.block_dim[1]},
                {4, &known.block_dim[2]},      {5, &known.grid_dim[0]},  {6, &known.grid_dim[1]},
                {7, &known.grid_dim[2]},       {10, &known.warp},        {12, &known.registers_per_block},
                {13, &known.clock},            {15, &known.overlap},     {16, &known.multiprocessors},
                {17, &known.timeout},          {18, &known.integrated},  {19, &known.maps_host_memory},
                {20, &known.compute_mode},     {75, &known.major},       {76, &known.minor}};
  for (auto& [attribute, value] : values)
    if (int code = cuDeviceGetAttribute(value, attribute, device)) return code;
  known.shared_per_block = 49152;
  known.constant_memory = 65536;
  memcpy(out, &known, sizeof known);
  return 0;
}

}  // namespace

// A call: counted, failed on demand, with the thread's device current.
#define RUNTIME(name, ...)                                    \
  EXPORT int name(__VA_ARGS__) {                              \
    if (int code = cuda_device_enter(#name, nullptr)) return keep(code); \
    if (int code = use(current)) return keep(code);
#define END }

EXPORT int cudaGetLastError() {
  int code = last_error;
  last_error = 0;
  return code;
}
EXPORT int cudaPeekAtLastError() { return last_error; }
EXPORT const char* cudaGetErrorString(int code) {
  const char* text;
  return cuGetErrorString(code, &text) ? "unrecognized error code" : text;
}
EXPORT const char* cudaGetErrorName(int code) {
  const char* text;
  return cuGetErrorName(code, &text) ? "unrecognized error code" : text;
}

EXPORT int cudaGetDeviceCount(int* count) {
  if (int code = cuda_device_enter("cudaGetDeviceCount", nullptr)) return keep(code);
  if (int code = cuInit(0)) return keep(code);
  return keep(cuDeviceGetCount(count));
}
EXPORT int cudaGetDevice(int* device) {
  *device = current;
  return 0;
}
EXPORT int cudaSetDevice(int device) {
  if (int code = cuda_device_enter("cudaSetDevice", nullptr)) return keep(code);
  if (int code = use(device)) return keep(code);
  current = device;
  return 0;
}
EXPORT int cudaGetDeviceProperties_v2(char* out, int device) {
  if (int code = cuda_device_enter("cudaGetDeviceProperties_v2", nullptr)) return keep(code);
  return keep(properties(out, device));
}
EXPORT int cudaDeviceGetPCIBusId(char* id, int capacity, int device) {
  if (int code = cuInit(0)) return keep(code);
  return keep(cuDeviceGetPCIBusId(id, capacity, device));
}
RUNTIME(cudaDeviceGetStreamPriorityRange, int* least, int* greatest)
  return keep(cuCtxGetStreamPriorityRange(least, greatest));
END
RUNTIME(cudaDeviceCanAccessPeer, int* can, int device, int peer)
  return keep(cuDeviceCanAccessPeer(can, device, peer));
END
RUNTIME(cudaDeviceEnablePeerAccess, int, unsigned)
  return keep(217);
END
RUNTIME(cudaDeviceSynchronize)
  return keep(cuCtxSynchronize());
END

RUNTIME(cudaMemGetInfo, size_t* free, size_t* total)
  return keep(cuMemGetInfo_v2(free, total));
END
RUNTIME(cudaMalloc, void** address, size_t bytes)
  return keep(cuMemAlloc_v2((uint64_t*)address, bytes));
END
RUNTIME(cudaFree, void* address)
  return keep(cuMemFree_v2((uint64_t)address));
END
RUNTIME(cudaHostAlloc, void** address, size_t bytes, unsigned flags)
  return keep(cuMemHostAlloc(address, bytes, flags));
END
RUNTIME(cudaFreeHost, void* address)
  return keep(address ? cuMemFreeHost(address) : 0);
END
RUNTIME(cudaMemcpy, void* to, const void* from, size_t bytes, int)
  return keep(cuMemcpy((uint64_t)to, (uint64_t)from, bytes));
END
RUNTIME(cudaMemcpyAsync, void* to, const void* from, size_t bytes, int, void* stream)
  return keep(cuMemcpyAsync((uint64_t)to, (uint64_t)from, bytes, stream));
END
RUNTIME(cudaMemset, void* to, int value, size_t bytes)
  return keep(cuMemsetD8_v2((uint64_t)to, (unsigned char)value, bytes));
END

RUNTIME(cudaStreamCreate, void** stream)
  return keep(cuStreamCreate(stream, 0));
END
RUNTIME(cudaStreamDestroy, void* stream)
  return keep(cuStreamDestroy_v2(stream));
END
RUNTIME(cudaStreamSynchronize, void* stream)
  return keep(cuStreamSynchronize(stream));
END
RUNTIME(cudaStreamGetFlags, void* stream, unsigned* flags)
  return keep(cuStreamGetFlags(stream, flags));
END
RUNTIME(cudaLaunchHostFunc, void* stream, void (*function)(void*), void* data)
  return keep(cuLaunchHostFunc(stream, function, data));
END

// 0: found, 1: not found.
EXPORT int cudaGetDriverEntryPoint(const char* name, void** function, uint64_t, int* result) {
  void* driver = dlopen("libcuda.so", RTLD_NOW);
  *function = driver ? dlsym(driver, name) : nullptr;
  if (result) *result = *function ? 0 : 1;
  return 0;
}

// Not on the software device.
#define REFUSED(name)                                       \
  EXPORT int name() {                                       \
    cuda_device_refused(801, #name " is not implemented");  \
    return keep(801);                                       \
  }
REFUSED(cudaMallocManaged)
REFUSED(cudaMemPrefetchAsync)
REFUSED(cudaIpcOpenMemHandle)
REFUSED(cudaIpcCloseMemHandle)
