// Calls about the process, devices, contexts and errors.
#include "driver.h"

#include <stdio.h>
#include <string.h>

#include <atomic>

namespace device {

static std::atomic<bool> initialized{false};

int begin(const char* name, bool* any) {
  int code = control::enter(name, any);
  Context* context = current_context();
  if (context && is_sticky(code)) lose(*context, code);
  return code;
}

int begin_in_context(const char* name, Context** context) {
  if (int code = begin(name)) return code;
  if (!initialized) return control::refuse(3, "%s before cuInit", name);
  *context = current_context();
  if (!*context) return control::refuse(201, "%s: this thread has no current context", name);
  if (!(*context)->references) return control::refuse(709, "%s: the primary context was released", name);
  return (*context)->lost;
}

static bool is_device(int device) { return initialized && device >= 0 && device < kDevices; }

struct Attribute {
  int number, value;
};
// Those of a small card of compute capability 8.6, the one with the least shared memory that the kernels have to suit.
static const Attribute attributes[] = {
    {1, 1024},         // threads a block
    {2, 1024},         // block dimension x
    {3, 1024},         // y
    {4, 64},           // z
    {5, 2147483647},   // grid dimension x
    {6, 65535},        // y
    {7, 65535},        // z
    {8, 49152},        // shared memory a block
    {9, 65536},        // constant memory
    {10, 32},          // lanes a warp
    {12, 65536},       // registers a block
    {13, 1000000},     // clock, kHz
    {14, 512},         // texture alignment
    {15, 1},           // copies overlap kernels
    {16, 8},           // multiprocessors
    {17, 0},           // kernel time limit
    {18, 0},           // integrated
    {19, 1},           // can map host memory
    {20, 0},           // compute mode: default
    {31, 1},           // concurrent kernels
    {32, 0},           // ECC
    {34, 0},           // PCI device
    {36, 1000000},     // memory clock, kHz
    {37, 128},         // memory bus, bits
    {38, 4 << 20},     // L2 bytes
    {39, 1536},        // threads a multiprocessor
    {40, 2},           // copy engines
    {41, 1},           // unified addressing
    {50, 0},           // PCI domain
    {75, 8},           // compute capability, major
    {76, 6},           // minor
    {78, 1},           // stream priorities
    {81, 102400},      // shared memory a multiprocessor
    {82, 65536},       // registers a multiprocessor
    {83, 1},           // managed memory
    {88, 0},           // pageable memory access
    {89, 0},           // concurrent managed access
    {91, 1},           // registered host memory has one address
    {95, 1},           // cooperative launch
    {97, 101376},      // shared memory a block that asks for more
    {106, 16},         // blocks a multiprocessor
    {111, 1024},       // reserved shared memory a block
    {115, 1},          // memory pools
};

}  // namespace device

using namespace device;

API cuInit(unsigned flags) {
  CALL_ANYWHERE(cuInit);
  if (flags) return 1;
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
    return control::refuse(100, "the software CUDA device needs a CPU with AVX2, FMA and F16C");
  simt::install_fault_handler();
  initialized = true;
  return 0;
}
API cuDriverGetVersion(int* version) {
  CALL_ANYWHERE(cuDriverGetVersion);
  *version = 13000;
  return 0;
}
API cuDeviceGetCount(int* count) {
  CALL_ANYWHERE(cuDeviceGetCount);
  if (!initialized) return 3;
  *count = kDevices;
  return 0;
}
API cuDeviceGet(int* device, int number) {
  CALL_ANYWHERE(cuDeviceGet);
  if (!initialized) return 3;
  if (!is_device(number)) return 101;
  *device = number;
  return 0;
}
API cuDeviceGetAttribute(int* value, int attribute, int device) {
  CALL_ANYWHERE(cuDeviceGetAttribute);
  if (!is_device(device)) return 101;
  if (attribute == 33) return *value = device + 1, 0;  // PCI bus
  for (const Attribute& known : attributes)
    if (known.number == attribute) return *value = known.value, 0;
  return control::refuse(1, "cuDeviceGetAttribute: the software device has no value for attribute %d", attribute);
}
API cuDeviceGetName(char* name, int capacity, int device) {
  CALL_ANYWHERE(cuDeviceGetName);
  if (!is_device(device) || capacity < 1) return 101;
  snprintf(name, capacity, "Software CUDA device %d", device);
  return 0;
}
static int uuid(char* out, int device) {
  if (!is_device(device)) return 101;
  memset(out, 0, 16);
  memcpy(out, "software", 8);
  out[15] = (char)device;
  return 0;
}
API cuDeviceGetUuid(char* out, int device) {
  CALL_ANYWHERE(cuDeviceGetUuid);
  return uuid(out, device);
}
API cuDeviceGetUuid_v2(char* out, int device) {
  CALL_ANYWHERE(cuDeviceGetUuid_v2);
  return uuid(out, device);
}
API cuDeviceTotalMem_v2(size_t* bytes, int device) {
  CALL_ANYWHERE(cuDeviceTotalMem_v2);
  if (!is_device(device)) return 101;
  *bytes = total(device);
  return 0;
}
API cuDeviceGetPCIBusId(char* id, int capacity, int device) {
  CALL_ANYWHERE(cuDeviceGetPCIBusId);
  if (!is_device(device)) return 101;
  snprintf(id, capacity, "0000:%02x:00.0", device + 1);
  return 0;
}
API cuDeviceCanAccessPeer(int* can, int device, int peer) {
  CALL_ANYWHERE(cuDeviceCanAccessPeer);
  if (!is_device(device) || !is_device(peer)) return 101;
  *can = 0;
  return 0;
}

API cuDevicePrimaryCtxRetain(void** out, int device) {
  CALL_ANYWHERE(cuDevicePrimaryCtxRetain);
  if (!is_device(device)) return 101;
  Context& context = context_of(device);
  context.references++;
  control::count_live("contexts", 1);
  *out = &context;
  return 0;
}
// With the last reference the context goes, with all that was made in it and with its error.
API cuDevicePrimaryCtxRelease_v2(int device) {
  CALL_ANYWHERE(cuDevicePrimaryCtxRelease_v2);
  if (!is_device(device)) return 101;
  Context& context = context_of(device);
  if (!context.references) return 201;
  control::count_live("contexts", -1);
  if (--context.references) return 0;
  drain(context);
  forget_streams_and_events(context);
  forget_modules(context);
  release_all(device);
  context.lost = 0;
  return 0;
}
API cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  CALL_ANYWHERE(cuDevicePrimaryCtxGetState);
  if (!is_device(device)) return 101;
  *flags = 0;
  *active = context_of(device).references > 0;
  return 0;
}
API cuCtxSetCurrent(void* context) {
  CALL_ANYWHERE(cuCtxSetCurrent);
  if (context && !is_context(context)) return control::refuse(201, "cuCtxSetCurrent: not a context");
  set_current_context((Context*)context);
  return 0;
}
API cuCtxGetCurrent(void** context) {
  CALL_ANYWHERE(cuCtxGetCurrent);
  *context = current_context();
  return 0;
}
static thread_local Context* pushed[16];
static thread_local int depth = 0;
API cuCtxPushCurrent_v2(void* context) {
  CALL_ANYWHERE(cuCtxPushCurrent_v2);
  if (!is_context(context) || depth == 16) return control::refuse(201, "cuCtxPushCurrent: not a context");
  pushed[depth++] = current_context();
  set_current_context((Context*)context);
  return 0;
}
API cuCtxPopCurrent_v2(void** context) {
  CALL_ANYWHERE(cuCtxPopCurrent_v2);
  if (!depth) return control::refuse(201, "cuCtxPopCurrent: nothing was pushed");
  if (context) *context = current_context();
  set_current_context(pushed[--depth]);
  return 0;
}
API cuCtxGetDevice(int* device) {
  CALL(cuCtxGetDevice);
  *device = context->number;
  return 0;
}
API cuCtxSynchronize() {
  CALL(cuCtxSynchronize);
  drain(*context);
  return context->lost;
}
API cuCtxSetFlags(unsigned) {
  CALL(cuCtxSetFlags);
  return 0;
}
API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  CALL(cuCtxGetStreamPriorityRange);
  *least = 0;
  *greatest = -5;
  return 0;
}

struct ErrorName {
  int code;
  const char *name, *text;
};
static const ErrorName error_names[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};
// These two never fail: they are what a failure is reported with.
API cuGetErrorName(int code, const char** name) {
  for (const ErrorName& known : error_names)
    if (known.code == code) return *name = known.name, 0;
  *name = nullptr;
  return 1;
}
API cuGetErrorString(int code, const char** text) {
  for (const ErrorName& known : error_names)
    if (known.code == code) return *text = known.text, 0;
  *text = nullptr;
  return 1;
}

// What the generated stubs of all other calls do (build.rs).
extern "C" __attribute__((visibility("hidden"))) int software_device_stub(const char* name) {
  if (int code = begin(name)) return code;
  return control::refuse(801, "%s is not implemented by the software device", name);
}

// All contexts as they were at the process's start but for memory, streams and events that are still alive.
EXPORT void cuda_device_recover() {
  for (int i = 0; i < kDevices; i++) context_of(i).lost = 0;
}
EXPORT void cuda_device_lose(int device, int code) { lose(context_of(device), code); }
