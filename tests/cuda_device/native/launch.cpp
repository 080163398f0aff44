// Modules, functions and launches.
#include <string.h>

#include <vector>

#include "driver.h"

namespace simt {
const Kernel* kernels = nullptr;
}

namespace device {

namespace {

struct Module {
  int number;
};

// A function is one of a module; its attributes are its own.
struct Function {
  const simt::Kernel* kernel;
  Module* module;
  int dynamic_shared_limit = 48 * 1024;
};

constexpr int kSharedOptIn = 101376;

std::mutex registry;
std::set<Module*> modules;
std::set<Function*> functions;

Function* function_of(void* handle) {
  std::lock_guard lock(registry);
  auto at = functions.find((Function*)handle);
  return at == functions.end() ? nullptr : *at;
}

// With its functions; the registry is locked.
void unload(Module* module) {
  modules.erase(module);
  for (auto at = functions.begin(); at != functions.end();) {
    if ((*at)->module != module) {
      ++at;
      continue;
    }
    delete *at;
    at = functions.erase(at);
  }
  delete module;
  control::count_live("modules", -1);
}

// The arguments of a launch, copied when it is enqueued.
struct Arguments {
  std::vector<uint64_t> storage;
  std::vector<void*> pointers;
};

int check_dimensions(const simt::Kernel& kernel, const simt::Dim3& grid, const simt::Dim3& block) {
  uint64_t threads = (uint64_t)block.x * block.y * block.z;
  if (!threads || block.x > 1024 || block.y > 1024 || block.z > 64 || threads > 1024)
    return control::refuse(1, "%s: a block of (%u, %u, %u) threads; at most 1024, 64 along z", kernel.name, block.x,
                           block.y, block.z);
  if (threads > kernel.max_threads)
    return control::refuse(1, "%s: %u threads, its __launch_bounds__ say %u", kernel.name, (unsigned)threads,
                           kernel.max_threads);
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535)
    return control::refuse(1, "%s: a grid of (%u, %u, %u) blocks; at least 1, at most (2147483647, 65535, 65535)",
                           kernel.name, grid.x, grid.y, grid.z);
  return 0;
}

}  // namespace

void forget_modules(Context& context) {
  std::lock_guard lock(registry);
  for (auto at = modules.begin(); at != modules.end();) {
    Module* module = *at++;
    if (module->number == context.number) unload(module);
  }
}

// Runs the launch and looks for what the hardware would have found.
static int perform(const Context& context, simt::Launch launch, const std::shared_ptr<Arguments>& arguments) {
  const simt::Kernel& kernel = *launch.kernel;
  std::vector<uint64_t> pointers;
  for (unsigned i = 0; i < kernel.arguments; i++) {
    uint64_t address = kernel.pointers[i] ? arguments->storage[i] : 0;
    if (!address) continue;
    Allocation found;
    if (!find(address, 0, &found))
      return control::refuse(700, "%s: argument %u is an address that is no live memory of a device", kernel.name, i);
    if (found.device != kPinned && found.device != context.number)
      return control::refuse(700, "%s: argument %u is memory of device %d, the launch is on %d", kernel.name, i,
                             found.device, context.number);
    pointers.push_back(address);
  }
  launch.arguments = arguments->pointers.data();
  simt::Outcome outcome = simt::run(launch);
  if (outcome.code) return control::refuse(outcome.code, "%s", outcome.message.c_str());
  std::string message;
  for (uint64_t address : pointers)
    if (overrun(address, &message)) return control::refuse(700, "%s: %s", kernel.name, message.c_str());
  return 0;
}

}  // namespace device

using namespace device;

// The image is checked for being one; what is run is what was compiled from the same sources.
API cuModuleLoadData(void** out, const void* image) {
  CALL(cuModuleLoadData);
  if (!image) return 1;
  uint32_t magic;
  memcpy(&magic, image, sizeof magic);
  if (magic != 0xba55ed50 && magic != 0x464c457f)
    return control::refuse(200, "cuModuleLoadData: neither a fatbin nor a cubin");
  Module* module = new Module{context->number};
  std::lock_guard lock(registry);
  modules.insert(module);
  control::count_live("modules", 1);
  *out = module;
  return 0;
}
API cuModuleUnload(void* handle) {
  CALL(cuModuleUnload);
  drain(*context);
  std::lock_guard lock(registry);
  if (!modules.count((Module*)handle)) return control::refuse(400, "cuModuleUnload: no such module");
  unload((Module*)handle);
  return 0;
}
API cuModuleGetFunction(void** out, void* handle, const char* name) {
  CALL(cuModuleGetFunction);
  std::lock_guard lock(registry);
  if (!modules.count((Module*)handle)) return control::refuse(400, "cuModuleGetFunction: no such module");
  for (Function* function : functions)
    if (function->module == handle && !strcmp(function->kernel->name, name)) return *out = function, 0;
  for (const simt::Kernel* kernel = simt::kernels; kernel; kernel = kernel->next)
    if (!strcmp(kernel->name, name)) {
      Function* function = new Function{kernel, (Module*)handle};
      functions.insert(function);
      return *out = function, 0;
    }
  return control::refuse(500, "cuModuleGetFunction: there is no kernel %s", name);
}
// 0: threads a block; 8: dynamic shared memory.
API cuFuncGetAttribute(int* value, int attribute, void* handle) {
  CALL(cuFuncGetAttribute);
  Function* function = function_of(handle);
  if (!function) return control::refuse(400, "cuFuncGetAttribute: no such function");
  if (attribute == 0) return *value = (int)function->kernel->max_threads, 0;
  if (attribute == 8) return *value = function->dynamic_shared_limit, 0;
  return control::refuse(801, "cuFuncGetAttribute: the software device does not know attribute %d", attribute);
}
API cuFuncSetAttribute(void* handle, int attribute, int value) {
  CALL(cuFuncSetAttribute);
  Function* function = function_of(handle);
  if (!function) return control::refuse(400, "cuFuncSetAttribute: no such function");
  if (attribute == 9) return value >= -1 && value <= 100 ? 0 : 1;  // a hint: the carveout
  if (attribute != 8) return control::refuse(1, "cuFuncSetAttribute: attribute %d cannot be set", attribute);
  if (value < 0 || value > kSharedOptIn)
    return control::refuse(1, "%s: %d bytes of shared memory, the device has %d", function->kernel->name, value,
                           kSharedOptIn);
  function->dynamic_shared_limit = value;
  return 0;
}
API cuLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared_bytes, void* stream_handle, void** parameters, void** extra) {
  CALL(cuLaunchKernel);
  Function* function = function_of(handle);
  auto stream = stream_of(stream_handle);
  if (!function || !stream) return control::refuse(400, "cuLaunchKernel: no such function or stream");
  const simt::Kernel& kernel = *function->kernel;
  if (function->module->number != context->number)
    return control::refuse(400, "%s: a function of device %d launched on %d", kernel.name, function->module->number,
                           context->number);
  simt::Launch launch = {};
  launch.kernel = &kernel;
  launch.grid = {grid_x, grid_y, grid_z};
  launch.block = {block_x, block_y, block_z};
  launch.dynamic_shared = shared_bytes;
  if (int code = check_dimensions(kernel, launch.grid, launch.block)) return code;
  if ((int)shared_bytes > function->dynamic_shared_limit)
    return control::refuse(1, "%s: %u bytes of dynamic shared memory, its attribute allows %d", kernel.name, shared_bytes,
                           function->dynamic_shared_limit);
  if (extra || (kernel.arguments && !parameters)) return control::refuse(1, "%s: no kernelParams", kernel.name);
  launch.shared_limit = function->dynamic_shared_limit > 48 * 1024 ? kSharedOptIn : 48 * 1024;
  launch.order = control::settings.order;
  launch.seed = control::settings.seed;
  launch.poison = control::settings.poison;
  control::count(std::string("kernel ") + kernel.name);

  auto arguments = std::make_shared<Arguments>();
  unsigned slots = 0;
  for (unsigned i = 0; i < kernel.arguments; i++) {
    if (!parameters[i]) return control::refuse(1, "%s: argument %u is missing", kernel.name, i);
    if (kernel.sizes[i] > 8) return control::refuse(801, "%s: argument %u is neither a number nor a pointer", kernel.name, i);
    slots++;
  }
  arguments->storage.resize(slots);
  for (unsigned i = 0; i < slots; i++) {
    memcpy(&arguments->storage[i], parameters[i], kernel.sizes[i]);
    arguments->pointers.push_back(&arguments->storage[i]);
  }
  // What a launch finds out, the host learns later; but for what the driver refuses at once.
  int refused = 0;
  enqueue(*stream, [=, at_once = control::settings.lazy ? nullptr : &refused]() -> int {
    int code = perform(*context, launch, arguments);
    if (is_sticky(code) || !code) return code;
    if (!at_once) return 719;
    *at_once = code;
    return 0;
  });
  return refused;
}
