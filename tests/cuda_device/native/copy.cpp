// Calls about memory: allocation, copies, sets.
#include <string.h>

#include <vector>

#include "driver.h"

namespace device {

enum class Place { kDevice, kPinned, kPageable, kNowhere };

// Where `bytes` bytes at `address` lie. Addresses of the reserved range that no allocation holds are nowhere.
static Place place(uint64_t address, uint64_t bytes) {
  if (!in_reservation(address)) return Place::kPageable;
  Allocation found;
  if (!find(address, bytes, &found)) return Place::kNowhere;
  return found.device == kPinned ? Place::kPinned : Place::kDevice;
}

// Copies of any direction. Synchronous ones, and asynchronous ones to pageable memory, wait for the stream; pageable
// memory that is read is copied away before the call returns; pinned memory is read and written when the work is done.
static int copy(const char* name, uint64_t to, uint64_t from, uint64_t bytes, std::shared_ptr<Stream> stream,
                bool synchronous) {
  if (!stream) return control::refuse(400, "%s: no such stream", name);
  if (!bytes) return 0;
  Place source = place(from, bytes), target = place(to, bytes);
  if (source == Place::kNowhere || target == Place::kNowhere)
    return control::refuse(1, "%s: %llu bytes %s 0x%llx are not within one live allocation", name,
                           (unsigned long long)bytes, source == Place::kNowhere ? "from" : "to",
                           (unsigned long long)(source == Place::kNowhere ? from : to));
  Context* context = stream->context;
  if (source == Place::kPageable) {
    auto staged = std::make_shared<std::vector<uint8_t>>((const uint8_t*)from, (const uint8_t*)from + bytes);
    enqueue(*stream, [=] {
      memcpy((void*)to, staged->data(), bytes);
      return 0;
    });
  } else {
    enqueue(*stream, [=] {
      memmove((void*)to, (const void*)from, bytes);
      return 0;
    });
  }
  if (synchronous || target == Place::kPageable) drain(*stream);
  return context->lost;
}

static int check_place(const char* name, const char* what, uint64_t address, uint64_t bytes, bool on_device) {
  Place found = place(address, bytes);
  bool suits = on_device ? found == Place::kDevice : found != Place::kDevice;
  // Pinned memory has one address for both sides.
  if (suits || found == Place::kPinned || !bytes) return 0;
  return control::refuse(1, "%s: the %s is %s", name, what,
                         found == Place::kNowhere ? "not within one live allocation"
                         : on_device              ? "not memory of the device"
                                                  : "memory of the device");
}

static int set(const char* name, uint64_t to, uint32_t value, uint32_t size, uint64_t count, void* stream_handle,
               bool synchronous) {
  auto stream = stream_of(stream_handle);
  if (!stream) return control::refuse(400, "%s: no such stream", name);
  if (!count) return 0;
  if (to % size) return control::refuse(1, "%s: the address is not a multiple of %u", name, size);
  if (int code = check_place(name, "target", to, count * size, true)) return code;
  enqueue(*stream, [=] {
    for (uint64_t i = 0; i < count; i++) memcpy((char*)to + i * size, &value, size);
    return 0;
  });
  if (synchronous) drain(*stream);
  return stream->context->lost;
}

static int take(int number, uint64_t bytes, uint64_t* address, const char* name) {
  int code = allocate(number, bytes, address);
  if (!code) return 0;
  return control::refuse(code, "%s of %llu bytes: %llu of %llu bytes are in use", name, (unsigned long long)bytes,
                         (unsigned long long)allocated(number), (unsigned long long)total(number));
}

static int give_back(const char* name, Context& context, uint64_t address, bool pinned) {
  Allocation found;
  if (!find(address, 0, &found) || found.address != address || (found.device == kPinned) != pinned)
    return control::refuse(1, "%s: nothing was allocated at that address", name);
  std::string message;
  int code = release(address, &message);
  if (code == 700) {
    lose(context, code);
    control::refuse(code, "%s: %s", name, message.c_str());
  }
  return code;
}

}  // namespace device

using namespace device;

API cuMemGetInfo_v2(size_t* free, size_t* all) {
  CALL(cuMemGetInfo_v2);
  *all = total(context->number);
  *free = *all - std::min<size_t>(*all, allocated(context->number));
  return 0;
}
API cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  CALL(cuMemAlloc_v2);
  return take(context->number, bytes, address, "cuMemAlloc");
}
// Waits for the whole device, as the real one does.
API cuMemFree_v2(uint64_t address) {
  CALL(cuMemFree_v2);
  if (!address) return 0;
  drain(*context);
  return give_back("cuMemFree", *context, address, false);
}
API cuMemAllocAsync(uint64_t* address, size_t bytes, void* stream) {
  CALL(cuMemAllocAsync);
  if (!stream_of(stream)) return control::refuse(400, "cuMemAllocAsync: no such stream");
  return take(context->number, bytes, address, "cuMemAllocAsync");
}
API cuMemFreeAsync(uint64_t address, void* stream_handle) {
  CALL(cuMemFreeAsync);
  auto stream = stream_of(stream_handle);
  if (!stream) return control::refuse(400, "cuMemFreeAsync: no such stream");
  enqueue(*stream, [=] { return give_back("cuMemFreeAsync", *context, address, false); });
  return context->lost;
}
API cuMemHostAlloc(void** address, size_t bytes, unsigned) {
  CALL(cuMemHostAlloc);
  return take(kPinned, bytes, (uint64_t*)address, "cuMemHostAlloc");
}
API cuMemAllocHost_v2(void** address, size_t bytes) {
  CALL(cuMemAllocHost_v2);
  return take(kPinned, bytes, (uint64_t*)address, "cuMemAllocHost");
}
API cuMemFreeHost(void* address) {
  CALL(cuMemFreeHost);
  drain(*context);
  return give_back("cuMemFreeHost", *context, (uint64_t)address, true);
}
API cuMemHostGetDevicePointer_v2(uint64_t* out, void* address, unsigned) {
  CALL(cuMemHostGetDevicePointer_v2);
  if (place((uint64_t)address, 1) != Place::kPinned) return 1;
  *out = (uint64_t)address;
  return 0;
}
API cuMemGetAddressRange_v2(uint64_t* base, size_t* bytes, uint64_t address) {
  CALL(cuMemGetAddressRange_v2);
  Allocation found;
  if (!find(address, 1, &found)) return 500;
  if (base) *base = found.address;
  if (bytes) *bytes = found.bytes;
  return 0;
}
// Only the attributes that tell device memory from host memory: 2 is the memory's type, 9 the device's number.
API cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
  CALL(cuPointerGetAttribute);
  Allocation found;
  if (!find(address, 1, &found)) return 1;
  if (attribute == 2) return *(unsigned*)value = found.device == kPinned ? 1 : 2, 0;
  if (attribute == 9) return *(int*)value = std::max(found.device, 0), 0;
  return control::refuse(801, "cuPointerGetAttribute: attribute %d", attribute);
}

#define DIRECTED(name, to_on_device, from_on_device, stream, synchronous)                             \
  CALL(name);                                                                                         \
  if (int code = check_place(#name, "target", (uint64_t)to, bytes, to_on_device)) return code;        \
  if (int code = check_place(#name, "source", (uint64_t)from, bytes, from_on_device)) return code;    \
  return copy(#name, (uint64_t)to, (uint64_t)from, bytes, stream_of(stream), synchronous)

API cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) { DIRECTED(cuMemcpyHtoD_v2, true, false, nullptr, true); }
API cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) { DIRECTED(cuMemcpyDtoH_v2, false, true, nullptr, true); }
API cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t bytes) { DIRECTED(cuMemcpyDtoD_v2, true, true, nullptr, false); }
API cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
  DIRECTED(cuMemcpyHtoDAsync_v2, true, false, stream, false);
}
API cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
  DIRECTED(cuMemcpyDtoHAsync_v2, false, true, stream, false);
}
API cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  DIRECTED(cuMemcpyDtoDAsync_v2, true, true, stream, false);
}
API cuMemcpy(uint64_t to, uint64_t from, size_t bytes) {
  CALL(cuMemcpy);
  return copy("cuMemcpy", to, from, bytes, stream_of(nullptr), true);
}
API cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  CALL(cuMemcpyAsync);
  return copy("cuMemcpyAsync", to, from, bytes, stream_of(stream), false);
}
API cuMemsetD8_v2(uint64_t to, unsigned char value, size_t count) {
  CALL(cuMemsetD8_v2);
  return set("cuMemsetD8", to, value, 1, count, nullptr, true);
}
API cuMemsetD8Async(uint64_t to, unsigned char value, size_t count, void* stream) {
  CALL(cuMemsetD8Async);
  return set("cuMemsetD8Async", to, value, 1, count, stream, false);
}
API cuMemsetD32_v2(uint64_t to, unsigned value, size_t count) {
  CALL(cuMemsetD32_v2);
  return set("cuMemsetD32", to, value, 4, count, nullptr, true);
}
API cuMemsetD32Async(uint64_t to, unsigned value, size_t count, void* stream) {
  CALL(cuMemsetD32Async);
  return set("cuMemsetD32Async", to, value, 4, count, stream, false);
}
