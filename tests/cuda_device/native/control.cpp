#include "control.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <vector>

#include "memory.h"

namespace control {

Settings settings;

namespace {

struct Fault {
  std::string name;  // "*": any call
  uint64_t nth;      // counted from when the fault was set
  int code;
};

struct State {
  std::mutex mutex;
  std::map<std::string, uint64_t> calls;
  std::map<std::string, int64_t> live;
  std::vector<Fault> faults;
  std::string message;
  std::string control_file;

  State();
};

State& state() {
  static State* instance = new State;
  return *instance;
}

bool set(State& state, const std::string& name, const std::string& value);

State::State() {
  for (const char* name : {"ORDER", "SEED", "LAZY", "POISON", "VERBOSE", "MEMORY", "FAIL"})
    if (const char* value = getenv((std::string("CUDA_DEVICE_") + name).c_str()))
      if (!set(*this, name, value)) {
        fprintf(stderr, "software CUDA device: CUDA_DEVICE_%s=%s is not understood\n", name, value);
        abort();
      }
  if (const char* file = getenv("CUDA_DEVICE_CONTROL")) control_file = file;
}

bool parse_fault(const std::string& text, Fault* fault) {
  size_t first = text.find(':'), second = text.find(':', first + 1);
  if (first == std::string::npos || second == std::string::npos) return false;
  fault->name = text.substr(0, first);
  fault->nth = strtoull(text.c_str() + first + 1, nullptr, 10);
  fault->code = atoi(text.c_str() + second + 1);
  return !fault->name.empty() && fault->nth && fault->code;
}

bool set(State& state, const std::string& name, const std::string& value) {
  bool on = value == "1";
  bool is_switch = on || value == "0";
  if (name == "ORDER") {
    if (value == "forward") settings.order = simt::Order::kForward;
    else if (value == "reverse") settings.order = simt::Order::kReverse;
    else if (value == "random") settings.order = simt::Order::kRandom;
    else return false;
  } else if (name == "SEED") {
    settings.seed = strtoull(value.c_str(), nullptr, 10);
  } else if (name == "LAZY" && is_switch) {
    settings.lazy = on;
  } else if (name == "POISON" && is_switch) {
    settings.poison = on;
    device::set_poison(on);
  } else if (name == "VERBOSE" && is_switch) {
    settings.verbose = on;
  } else if (name == "MEMORY") {
    device::set_total(strtoull(value.c_str(), nullptr, 10));
  } else if (name == "FAIL") {
    std::vector<Fault> faults;
    for (size_t at = 0; at < value.size();) {
      size_t comma = std::min(value.find(',', at), value.size());
      Fault fault;
      if (!parse_fault(value.substr(at, comma - at), &fault)) return false;
      faults.push_back(fault);
      at = comma + 1;
    }
    state.faults = faults;
  } else {
    return false;
  }
  return true;
}

// Takes NAME=VALUE lines from the control file, once, when somebody has put one there.
void read_control_file(State& state) {
  if (state.control_file.empty()) return;
  std::string taken = state.control_file + ".taken";
  if (rename(state.control_file.c_str(), taken.c_str())) return;
  FILE* file = fopen(taken.c_str(), "r");
  if (!file) return;
  char line[512];
  while (fgets(line, sizeof line, file)) {
    line[strcspn(line, "\r\n")] = 0;
    char* equals = strchr(line, '=');
    if (!*line) continue;
    if (!equals || !set(state, std::string(line, equals - line), equals + 1))
      fprintf(stderr, "software CUDA device: '%s' in the control file is not understood\n", line);
  }
  fclose(file);
}

}  // namespace

int enter(const char* name, bool* any) {
  State& state = control::state();
  std::lock_guard lock(state.mutex);
  read_control_file(state);
  state.calls[name]++;
  for (size_t i = 0; i < state.faults.size(); i++) {
    Fault& fault = state.faults[i];
    if ((fault.name != "*" && fault.name != name) || --fault.nth) continue;
    int code = fault.code;
    if (any) *any = fault.name == "*";
    state.faults.erase(state.faults.begin() + i);
    state.message = std::string(name) + " fails with " + std::to_string(code) + ", as the test asked";
    return code;
  }
  return 0;
}

int refuse(int code, const char* format, ...) {
  char text[640];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  State& state = control::state();
  std::lock_guard lock(state.mutex);
  state.message = text;
  if (settings.verbose) fprintf(stderr, "software CUDA device: error %d: %s\n", code, text);
  return code;
}

void count(const std::string& name) {
  State& state = control::state();
  std::lock_guard lock(state.mutex);
  state.calls[name]++;
}

void count_live(const char* kind, int change) {
  State& state = control::state();
  std::lock_guard lock(state.mutex);
  state.live[kind] += change;
}

}  // namespace control

using control::state;

// False where the setting or its value is not known.
EXPORT bool cuda_device_set(const char* name, const char* value) {
  auto& all = state();
  std::lock_guard lock(all.mutex);
  return control::set(all, name, value);
}

EXPORT uint64_t cuda_device_calls(const char* name) {
  auto& all = state();
  std::lock_guard lock(all.mutex);
  auto at = all.calls.find(name);
  return at == all.calls.end() ? 0 : at->second;
}

// All calls as lines "NAME COUNT", as far as they fit, with a NUL; the bytes that all need.
EXPORT uint64_t cuda_device_all_calls(char* text, uint64_t capacity) {
  auto& all = state();
  std::lock_guard lock(all.mutex);
  std::string lines;
  for (auto& [name, count] : all.calls) lines += name + " " + std::to_string(count) + "\n";
  if (capacity) snprintf(text, capacity, "%s", lines.c_str());
  return lines.size() + 1;
}

EXPORT void cuda_device_forget_calls() {
  auto& all = state();
  std::lock_guard lock(all.mutex);
  all.calls.clear();
}

EXPORT uint64_t cuda_device_faults_left() {
  auto& all = state();
  std::lock_guard lock(all.mutex);
  return all.faults.size();
}

EXPORT int64_t cuda_device_live(const char* kind) {
  auto& all = state();
  std::lock_guard lock(all.mutex);
  auto at = all.live.find(kind);
  return at == all.live.end() ? 0 : at->second;
}

EXPORT uint64_t cuda_device_message(char* text, uint64_t capacity) {
  auto& all = state();
  std::lock_guard lock(all.mutex);
  if (capacity) snprintf(text, capacity, "%s", all.message.c_str());
  return all.message.size() + 1;
}

EXPORT uint64_t cuda_device_allocated(int device) { return device::allocated(device); }

EXPORT bool cuda_device_protects_memory() { return device::protects_memory(); }
