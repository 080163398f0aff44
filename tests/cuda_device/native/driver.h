// What every call of the driver starts with.
#pragma once
#include "control.h"
#include "stream.h"

// Exported; the result is a CUresult.
#define API extern "C" __attribute__((visibility("default"))) int

namespace device {

// Counts the call; the code that it fails with where the test asked for that (which may lose the device).
int begin(const char* name, bool* any = nullptr);
// The same for calls that need a context: 201 where none is current, and its error where it is lost.
int begin_in_context(const char* name, Context** context);

}  // namespace device

// A call that needs a current context.
#define CALL(name)                                  \
  [[maybe_unused]] device::Context* context = nullptr; \
  if (int code = device::begin_in_context(#name, &context)) return code
// A call that needs none.
#define CALL_ANYWHERE(name) \
  if (int code = device::begin(#name)) return code
