#include "memory.h"

#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <mutex>

namespace device {

uint64_t reservation = 0;

namespace {

constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kAlignment = 256;  // as cuMemAlloc
constexpr uint64_t kDefaultTotal = 4ull << 30;

struct Mapping : Allocation {
  uint64_t begin = 0, mapped = 0;  // whole pages; a page that cannot be accessed is on either side
};

struct Memory {
  std::mutex mutex;
  std::map<uint64_t, Mapping> live;  // by address
  uint64_t next = 0;
  uint64_t used[kDevices + 1] = {};  // the last one is pinned
  uint64_t total = kDefaultTotal;
  bool poison = true;
  int key = -1;  // of memory protection; -1: none to be had

  Memory() {
    void* range = mmap(nullptr, kReservedBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return;
    reservation = next = (uint64_t)range;
    key = pkey_alloc(0, PKEY_DISABLE_ACCESS);
  }
};

Memory& memory() {
  static Memory* instance = new Memory;  // outlives whatever runs at the process's end
  return *instance;
}

uint64_t& used(Memory& memory, int device) { return memory.used[device == kPinned ? kDevices : device]; }

void unmap(const Mapping& mapping) {
  mmap((void*)mapping.begin, mapping.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

bool all_poison(uint64_t from, uint64_t to) {
  return std::all_of((const uint8_t*)from, (const uint8_t*)to, [](uint8_t byte) { return byte == 0xff; });
}

bool overrun(const Mapping& mapping, std::string* message) {
  DeviceAccess access;
  uint64_t end = mapping.address + mapping.bytes;
  bool before = !all_poison(mapping.begin, mapping.address);
  if (!before && all_poison(end, mapping.begin + mapping.mapped)) return false;
  *message = std::string("a write ") + (before ? "just before" : "beyond the end of") + " an allocation of " +
             std::to_string(mapping.bytes) + " bytes";
  // Told once.
  memset((void*)mapping.begin, 0xff, mapping.address - mapping.begin);
  memset((void*)end, 0xff, mapping.begin + mapping.mapped - end);
  return true;
}

Mapping* holding(Memory& memory, uint64_t address) {
  auto after = memory.live.upper_bound(address);
  if (after == memory.live.begin()) return nullptr;
  Mapping& mapping = std::prev(after)->second;
  return address <= mapping.address + mapping.bytes ? &mapping : nullptr;
}

uint32_t read_rights() {
  uint32_t rights, unused;
  asm volatile("rdpkru" : "=a"(rights), "=d"(unused) : "c"(0));
  return rights;
}

void write_rights(uint32_t rights) { asm volatile("wrpkru" : : "a"(rights), "c"(0), "d"(0) : "memory"); }

}  // namespace

DeviceAccess::DeviceAccess() : before(0) {
  int key = memory().key;
  if (key < 0) return;
  before = read_rights();
  write_rights(before & ~(3u << (2 * key)));
}

DeviceAccess::~DeviceAccess() {
  if (memory().key >= 0) write_rights(before);
}

bool protects_memory() { return memory().key >= 0; }

int allocate(int device, uint64_t bytes, uint64_t* address) {
  Memory& memory = device::memory();
  if (!bytes) return 1;
  std::lock_guard lock(memory.mutex);
  uint64_t aligned = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  uint64_t mapped = (aligned + kPageBytes - 1) / kPageBytes * kPageBytes;
  if (bytes > kReservedBytes || !reservation) return 2;
  if (device != kPinned && used(memory, device) + bytes > memory.total) return 2;
  if (memory.next + mapped + 2 * kPageBytes > reservation + kReservedBytes) return 2;
  Mapping mapping;
  mapping.begin = memory.next + kPageBytes;
  mapping.mapped = mapped;
  // At the end of its pages, so that what lies beyond is a page that cannot be accessed.
  mapping.address = mapping.begin + mapped - aligned;
  mapping.bytes = bytes;
  mapping.device = device;
  int key = device == kPinned ? -1 : memory.key;  // -1 is that of plain mprotect
  if (pkey_mprotect((void*)mapping.begin, mapped, PROT_READ | PROT_WRITE, key)) return 2;
  memory.next = mapping.begin + mapped;
  DeviceAccess access;
  memset((void*)mapping.begin, 0xff, mapping.address - mapping.begin);
  if (memory.poison) memset((void*)mapping.address, 0xff, bytes);
  memset((void*)(mapping.address + bytes), 0xff, aligned - bytes);
  used(memory, device) += bytes;
  memory.live[mapping.address] = mapping;
  *address = mapping.address;
  return 0;
}

int release(uint64_t address, std::string* message) {
  Memory& memory = device::memory();
  std::lock_guard lock(memory.mutex);
  auto at = memory.live.find(address);
  if (at == memory.live.end()) return 1;
  bool damaged = overrun(at->second, message);
  unmap(at->second);
  used(memory, at->second.device) -= at->second.bytes;
  memory.live.erase(at);
  return damaged ? 700 : 0;
}

void release_all(int device) {
  Memory& memory = device::memory();
  std::lock_guard lock(memory.mutex);
  for (auto at = memory.live.begin(); at != memory.live.end();) {
    if (at->second.device != device) {
      ++at;
      continue;
    }
    unmap(at->second);
    at = memory.live.erase(at);
  }
  used(memory, device) = 0;
}

bool find(uint64_t address, uint64_t bytes, Allocation* found) {
  Memory& memory = device::memory();
  std::lock_guard lock(memory.mutex);
  const Mapping* mapping = holding(memory, address);
  if (!mapping || bytes > mapping->bytes || address + bytes > mapping->address + mapping->bytes) return false;
  *found = *mapping;
  return true;
}

bool overrun(uint64_t address, std::string* message) {
  Memory& memory = device::memory();
  std::lock_guard lock(memory.mutex);
  const Mapping* mapping = holding(memory, address);
  return mapping && overrun(*mapping, message);
}

uint64_t allocated(int device) {
  Memory& memory = device::memory();
  std::lock_guard lock(memory.mutex);
  return used(memory, device);
}

uint64_t total(int) {
  Memory& memory = device::memory();
  std::lock_guard lock(memory.mutex);
  return memory.total;
}

void set_total(uint64_t bytes) {
  Memory& memory = device::memory();
  std::lock_guard lock(memory.mutex);
  memory.total = bytes ? bytes : kDefaultTotal;
}

void set_poison(bool on) {
  Memory& memory = device::memory();
  std::lock_guard lock(memory.mutex);
  memory.poison = on;
}

}  // namespace device
