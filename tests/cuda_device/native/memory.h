// Memory of the devices and pinned host memory, all in one reserved range of addresses, which are never used twice.
#pragma once
#include <stdint.h>

#include <string>

namespace device {

constexpr int kDevices = 2;
constexpr int kPinned = -1;  // in place of a device's number

extern uint64_t reservation;
constexpr uint64_t kReservedBytes = 1ull << 40;
inline bool in_reservation(uint64_t address) { return address - reservation < kReservedBytes; }

// Memory of the devices, but for pinned memory, can be touched by a thread only while it has one of these: host code that
// follows a device's address faults, as it would with a card. Where the CPU or the kernel has no protection keys it does
// not (`protects_memory`).
class DeviceAccess {
 public:
  DeviceAccess();
  ~DeviceAccess();
  DeviceAccess(const DeviceAccess&) = delete;

 private:
  uint32_t before;
};
bool protects_memory();

struct Allocation {
  uint64_t address = 0, bytes = 0;
  int device = 0;  // or kPinned
};

// A CUresult: 0, or 2 where the device has not so much left. Fresh memory is poisoned (NaN in every float type).
int allocate(int device, uint64_t bytes, uint64_t* address);
// The memory is gone afterwards: an access to it faults. 1 where nothing was allocated there; 700 where something was
// written just before or beyond it, with the reason in `message`.
int release(uint64_t address, std::string* message);
void release_all(int device);
// The live allocation that holds all of [address, address + bytes); false where there is none.
bool find(uint64_t address, uint64_t bytes, Allocation* found);
// Whether something was written just before or beyond the allocation that holds `address`.
bool overrun(uint64_t address, std::string* message);

uint64_t allocated(int device);
uint64_t total(int device);
void set_total(uint64_t bytes);
void set_poison(bool on);

}  // namespace device
