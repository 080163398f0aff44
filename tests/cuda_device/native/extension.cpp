#include "extension.h"

#include "driver.h"

using namespace device;

int cuda_device_enter(const char* name, bool* any) { return begin(name, any); }

void cuda_device_refused(int code, const char* text) { control::refuse(code, "%s", text); }

void cuda_device_count_live(const char* kind, int change) { control::count_live(kind, change); }

int cuda_device_enqueue(void* handle, const std::function<int()>& work) {
  Context* context = current_context();
  if (!context || !context->references) return control::refuse(201, "no context is current");
  if (context->lost) return context->lost;
  auto stream = stream_of(handle);
  if (!stream) return control::refuse(400, "no such stream");
  enqueue(*stream, work);
  return 0;
}

bool cuda_device_holds(uint64_t address, uint64_t bytes) {
  Context* context = current_context();
  Allocation found;
  return context && find(address, bytes, &found) && (found.device == kPinned || found.device == context->number);
}

bool cuda_device_poisons() { return control::settings.poison; }
