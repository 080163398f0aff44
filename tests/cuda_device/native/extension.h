// What the libraries beside the driver use of it: one device state, one set of faults and counts.
#pragma once
#include <stdint.h>

#include <functional>

#define EXPORT extern "C" __attribute__((visibility("default")))

// Counts the call of `name`; the code that the test wants it to fail with, or 0. `any`: it asked for any call.
EXPORT int cuda_device_enter(const char* name, bool* any);
// Keeps and prints the reason of a refusal.
EXPORT void cuda_device_refused(int code, const char* text);
EXPORT void cuda_device_count_live(const char* kind, int change);
// Gives work to a stream of the current context; a CUresult. What the work returns, if not 0, loses the device.
EXPORT int cuda_device_enqueue(void* stream, const std::function<int()>& work);
// Whether one live allocation of the current context's device, or of pinned memory, holds the bytes.
EXPORT bool cuda_device_holds(uint64_t address, uint64_t bytes);
EXPORT bool cuda_device_poisons();
