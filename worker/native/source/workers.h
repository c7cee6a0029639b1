// A few threads that share loops with the thread that calls.
//
// A loop's items are handed out from one word that also names the loop, so a thread that
// wakes late, or was taken off its core, finds nothing to do and holds nobody up: the
// caller waits only for items that someone has begun. Who waits spins for a moment and
// then sleeps, so that other programs on the same cores get them.
#pragma once
#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace noria {

class Workers {
 public:
  // Null without memory or threads. `threads` counts the caller's too.
  static Workers* start(int threads);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int threads() const { return threads_; }
  // False in a forked child, where the threads do not exist.
  bool usable() const;

  // Calls body(item, thread) for each item of [0, count), handed out in this order; `thread`
  // is below threads(). Items must not depend on each other. Even: they cost about the same,
  // and neighbours are better done by one thread.
  template <class Body>
  void even(int count, const Body& body) {
    run(count, true, &call<Body>, &body);
  }
  template <class Body>
  void uneven(int count, const Body& body) {
    run(count, false, &call<Body>, &body);
  }

 private:
  using Call = void (*)(const void* body, int item, int thread);
  struct Seat {
    Workers* workers;
    int thread;
    pthread_t handle;
  };
  static constexpr uint32_t kEven = 1u << 31;

  explicit Workers(int threads) : threads_(threads) {}
  template <class Body>
  static void call(const void* body, int item, int thread) {
    (*static_cast<const Body*>(body))(item, thread);
  }
  void run(int count, bool even, Call call, const void* body);
  bool take(uint64_t word, int thread);
  void wait_for_items(uint64_t word);
  void wait_for_end(uint32_t count);
  void work(int thread);
  static void* enter(void* seat);

  // Upper half: the loop's number. Lower half: kEven, and how many items are not taken yet.
  alignas(64) std::atomic<uint64_t> word_{0};
  alignas(64) std::atomic<uint32_t> finished_{0};
  std::atomic<uint32_t> caller_sleeps_{0};
  alignas(64) std::atomic<uint32_t> sleeping_{0};
  std::atomic<bool> stopping_{false};
  // The current loop's; they change only when all its items are finished.
  alignas(64) Call call_ = nullptr;
  const void* body_ = nullptr;
  uint32_t count_ = 0;
  int threads_ = 1;
  int process_ = 0;
  Seat* seats_ = nullptr;
};

}  // namespace noria
