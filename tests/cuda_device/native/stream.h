// Contexts, streams and events.
//
// Eagerly, work is done when it is enqueued. Lazily, it is done when the host waits for it, and no earlier: a host
// that does not wait reads old data, and a stream that does not wait for another's event runs ahead of it.
#pragma once
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>

#include "memory.h"

namespace device {

struct Stream;

struct Context {
  int number = 0;  // of the device
  int references = 0;
  std::atomic<int> lost{0};  // the CUresult that every call gets after a fault of a kernel
  std::set<std::shared_ptr<Stream>> streams;
  std::shared_ptr<Stream> legacy;  // the default stream
};

using Work = std::function<int()>;

struct Stream {
  Context* context;
  bool blocking;  // waits for the default stream, and it for this one
  std::recursive_mutex mutex;
  std::deque<Work> queue;
  uint64_t enqueued = 0, done = 0;
};

Context& context_of(int device);
Context* current_context();
void set_current_context(Context* context);
bool is_context(const void* handle);

// The stream of a handle, in the current context (0 and 1: its default stream). Null where there is none.
std::shared_ptr<Stream> stream_of(void* handle);

// Runs `work` now or later; its code, if not 0, is what the context's calls get from then on. How many pieces of work the
// stream has been given with it.
uint64_t enqueue(Stream& stream, Work work);
// Does all work that the stream has been given.
void drain(Stream& stream);
void drain(Context& context);
bool idle(Stream& stream);
void drain_until(Stream& stream, uint64_t count);

// What the end of a context takes along.
void forget_streams_and_events(Context& context);
void forget_modules(Context& context);

// Marks the context as lost.
void lose(Context& context, int code);
bool is_sticky(int code);

}  // namespace device
