// How tests steer the software device: settings, faults, counts, and the reason of the last refusal.
//
// Settings come from the environment (CUDA_DEVICE_ORDER=reverse), from the functions that lib.rs calls, and, while a
// server runs, from the file that CUDA_DEVICE_CONTROL names.
#pragma once
#include <stdint.h>

#include <atomic>
#include <string>

#include "block.h"
#include "extension.h"

namespace control {

struct Settings {
  std::atomic<simt::Order> order{simt::Order::kForward};
  std::atomic<uint64_t> seed{1};
  std::atomic<bool> lazy{false};
  std::atomic<bool> poison{true};
  std::atomic<bool> verbose{true};
};
extern Settings settings;

// Counts the call of `name`; the code that it has to fail with, or 0.
// `any`, if given, is set to whether the test asked for any call.
int enter(const char* name, bool* any = nullptr);
// Counts only.
void count(const std::string& name);
// Keeps the reason of a refusal (and prints it, unless verbose is off); returns `code`.
int refuse(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Objects that are alive, by kind, to find leaks.
void count_live(const char* kind, int change);

}  // namespace control
