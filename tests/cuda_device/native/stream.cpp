#include "stream.h"

#include <time.h>

#include <vector>

#include "driver.h"

namespace device {

namespace {

struct Event {
  Context* context;
  std::shared_ptr<Stream> stream;  // where it was recorded last
  uint64_t position = 0;           // the work of that stream up to here
  std::shared_ptr<double> milliseconds = std::make_shared<double>(0);
  bool timing = true;
};

thread_local Context* current = nullptr;

std::mutex registry;  // of streams and events
std::set<std::shared_ptr<Event>> events;

// One drain at a time: streams wait for each other.
std::recursive_mutex& draining() {
  static std::recursive_mutex* mutex = new std::recursive_mutex;
  return *mutex;
}

double now_milliseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

void perform(Stream& stream, const Work& work) {
  // A lost device does nothing more.
  DeviceAccess access;
  if (!stream.context->lost)
    if (int code = work()) lose(*stream.context, code);
}

std::shared_ptr<Event> event_of(void* handle) {
  std::lock_guard lock(registry);
  for (auto& event : events)
    if (event.get() == handle) return event;
  return nullptr;
}

std::vector<std::shared_ptr<Stream>> streams_of(Context& context) {
  std::lock_guard lock(registry);
  return {context.streams.begin(), context.streams.end()};
}

bool reached(const Event& event) {
  if (!event.stream) return true;
  std::lock_guard lock(event.stream->mutex);
  return event.stream->done >= event.position;
}

}  // namespace

Context& context_of(int device) {
  static Context* contexts = [] {
    auto* all = new Context[kDevices];
    for (int i = 0; i < kDevices; i++) {
      all[i].number = i;
      all[i].legacy = std::make_shared<Stream>();
      all[i].legacy->context = &all[i];
      all[i].legacy->blocking = false;
      all[i].streams.insert(all[i].legacy);
    }
    return all;
  }();
  return contexts[device];
}

bool is_context(const void* handle) {
  for (int i = 0; i < kDevices; i++)
    if (handle == &context_of(i)) return true;
  return false;
}

Context* current_context() { return current; }
void set_current_context(Context* context) { current = context; }

bool is_sticky(int code) { return code == 214 || code == 220 || code == 700 || (code >= 714 && code <= 719); }

void lose(Context& context, int code) {
  int none = 0;
  context.lost.compare_exchange_strong(none, code);
}

std::shared_ptr<Stream> stream_of(void* handle) {
  if (!current) return nullptr;
  if ((uint64_t)handle <= 1) return current->legacy;
  std::lock_guard lock(registry);
  for (auto& stream : current->streams)
    if (stream.get() == handle) return stream;
  return nullptr;
}

void drain_until(Stream& stream, uint64_t count) {
  std::lock_guard one(draining());
  std::lock_guard lock(stream.mutex);
  while (stream.done < count && !stream.queue.empty()) {
    Work work = std::move(stream.queue.front());
    stream.queue.pop_front();
    perform(stream, work);
    stream.done++;
  }
}

void drain(Stream& stream) {
  {
    // What runs eagerly on another host thread holds the stream until it is done.
    std::lock_guard lock(stream.mutex);
    if (stream.queue.empty()) return;
  }
  drain_until(stream, ~0ull);
}

void drain(Context& context) {
  for (auto& stream : streams_of(context)) drain(*stream);
}

bool idle(Stream& stream) {
  std::lock_guard lock(stream.mutex);
  return stream.queue.empty();
}

uint64_t enqueue(Stream& stream, Work work) {
  Context& context = *stream.context;
  if (&stream == context.legacy.get()) {
    for (auto& other : streams_of(context))
      if (other->blocking) drain(*other);
  } else if (stream.blocking) {
    drain(*context.legacy);
  }
  if (!control::settings.lazy) drain(stream);
  std::lock_guard lock(stream.mutex);
  stream.enqueued++;
  if (control::settings.lazy) {
    stream.queue.push_back(std::move(work));
  } else {
    perform(stream, work);
    stream.done++;
  }
  return stream.enqueued;
}

void forget_streams_and_events(Context& context) {
  std::lock_guard lock(registry);
  for (auto at = events.begin(); at != events.end();) {
    bool own = (*at)->context == &context;
    if (own) control::count_live("events", -1);
    at = own ? events.erase(at) : std::next(at);
  }
  control::count_live("streams", 1 - (int)context.streams.size());
  context.streams = {context.legacy};
}

}  // namespace device

using namespace device;

API cuStreamCreate(void** stream, unsigned flags) {
  CALL(cuStreamCreate);
  if (flags > 1) return control::refuse(1, "cuStreamCreate: flags %u", flags);
  auto created = std::make_shared<Stream>();
  created->context = context;
  created->blocking = flags == 0;
  std::lock_guard lock(registry);
  context->streams.insert(created);
  control::count_live("streams", 1);
  *stream = created.get();
  return 0;
}
API cuStreamCreateWithPriority(void** stream, unsigned flags, int) {
  CALL(cuStreamCreateWithPriority);
  return cuStreamCreate(stream, flags);
}
API cuStreamDestroy_v2(void* handle) {
  CALL(cuStreamDestroy_v2);
  auto stream = stream_of(handle);
  if (!stream || stream == context->legacy) return control::refuse(400, "cuStreamDestroy: no such stream");
  // Its work is done all the same, some time later; to do it now is one of the allowed orders.
  drain(*stream);
  std::lock_guard lock(registry);
  context->streams.erase(stream);
  control::count_live("streams", -1);
  return 0;
}
API cuStreamSynchronize(void* handle) {
  CALL(cuStreamSynchronize);
  auto stream = stream_of(handle);
  if (!stream) return control::refuse(400, "cuStreamSynchronize: no such stream");
  if (stream == context->legacy) drain(*context);
  drain(*stream);
  return context->lost;
}
API cuStreamQuery(void* handle) {
  CALL(cuStreamQuery);
  auto stream = stream_of(handle);
  if (!stream) return control::refuse(400, "cuStreamQuery: no such stream");
  if (idle(*stream)) return context->lost;
  // Whoever asks again and again is to see an end.
  drain_until(*stream, stream->done + 1);
  return 600;
}
API cuStreamWaitEvent(void* handle, void* event_handle, unsigned) {
  CALL(cuStreamWaitEvent);
  auto stream = stream_of(handle);
  auto event = event_of(event_handle);
  if (!stream || !event) return control::refuse(400, "cuStreamWaitEvent: no such stream or event");
  if (!event->stream) return 0;
  if (!control::settings.lazy)
    drain_until(*event->stream, event->position);
  else
    enqueue(*stream, [other = event->stream, position = event->position] {
      drain_until(*other, position);
      return 0;
    });
  return 0;
}
API cuStreamIsCapturing(void* handle, int* status) {
  CALL(cuStreamIsCapturing);
  if (!stream_of(handle)) return control::refuse(400, "cuStreamIsCapturing: no such stream");
  *status = 0;
  return 0;
}
API cuStreamGetFlags(void* handle, unsigned* flags) {
  CALL(cuStreamGetFlags);
  auto stream = stream_of(handle);
  if (!stream) return control::refuse(400, "cuStreamGetFlags: no such stream");
  *flags = stream == context->legacy || stream->blocking ? 0 : 1;
  return 0;
}
API cuStreamGetCtx(void* handle, void** out) {
  CALL(cuStreamGetCtx);
  auto stream = stream_of(handle);
  if (!stream) return control::refuse(400, "cuStreamGetCtx: no such stream");
  *out = stream->context;
  return 0;
}
API cuLaunchHostFunc(void* handle, void (*function)(void*), void* data) {
  CALL(cuLaunchHostFunc);
  auto stream = stream_of(handle);
  if (!stream) return control::refuse(400, "cuLaunchHostFunc: no such stream");
  enqueue(*stream, [=] {
    function(data);
    return 0;
  });
  return 0;
}

API cuEventCreate(void** event, unsigned flags) {
  CALL(cuEventCreate);
  auto created = std::make_shared<Event>();
  created->context = context;
  created->timing = !(flags & 2);
  std::lock_guard lock(registry);
  events.insert(created);
  control::count_live("events", 1);
  *event = created.get();
  return 0;
}
API cuEventDestroy_v2(void* handle) {
  CALL(cuEventDestroy_v2);
  auto event = event_of(handle);
  if (!event) return control::refuse(400, "cuEventDestroy: no such event");
  std::lock_guard lock(registry);
  events.erase(event);
  control::count_live("events", -1);
  return 0;
}
API cuEventRecord(void* handle, void* stream_handle) {
  CALL(cuEventRecord);
  auto stream = stream_of(stream_handle);
  auto event = event_of(handle);
  if (!stream || !event) return control::refuse(400, "cuEventRecord: no such stream or event");
  auto time = std::make_shared<double>(0);
  event->position = enqueue(*stream, [time] {
    *time = now_milliseconds();
    return 0;
  });
  event->stream = stream;
  event->milliseconds = time;
  return 0;
}
API cuEventQuery(void* handle) {
  CALL(cuEventQuery);
  auto event = event_of(handle);
  if (!event) return control::refuse(400, "cuEventQuery: no such event");
  if (reached(*event)) return context->lost;
  drain_until(*event->stream, event->stream->done + 1);
  return 600;
}
API cuEventSynchronize(void* handle) {
  CALL(cuEventSynchronize);
  auto event = event_of(handle);
  if (!event) return control::refuse(400, "cuEventSynchronize: no such event");
  if (event->stream) drain_until(*event->stream, event->position);
  return context->lost;
}
static int elapsed(float* milliseconds, void* from, void* to) {
  auto first = event_of(from), second = event_of(to);
  if (!first || !second || !first->timing || !second->timing || !first->stream || !second->stream)
    return control::refuse(400, "cuEventElapsedTime: an event that was not recorded or has no timing");
  if (!reached(*first) || !reached(*second)) return 600;
  *milliseconds = (float)(*second->milliseconds - *first->milliseconds);
  return 0;
}
API cuEventElapsedTime(float* milliseconds, void* from, void* to) {
  CALL(cuEventElapsedTime);
  return elapsed(milliseconds, from, to);
}
API cuEventElapsedTime_v2(float* milliseconds, void* from, void* to) {
  CALL(cuEventElapsedTime_v2);
  return elapsed(milliseconds, from, to);
}
