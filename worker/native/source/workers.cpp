#include "workers.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <x86intrin.h>

#include <algorithm>
#include <new>

namespace noria {

namespace {

// About 30 microseconds: longer than the pauses inside a step, shorter than those between.
constexpr uint64_t kSpinCycles = 80'000;

void sleep_while(const void* address, uint32_t value) {
  syscall(SYS_futex, address, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(const void* address, int how_many) {
  syscall(SYS_futex, address, FUTEX_WAKE_PRIVATE, how_many, nullptr, nullptr, 0);
}

template <class Condition>
bool spin_until(const Condition& condition) {
  uint64_t start = __rdtsc();
  do {
    for (int i = 0; i < 8; i++) {
      if (condition()) return true;
      _mm_pause();
    }
  } while (__rdtsc() - start < kSpinCycles);
  return condition();
}

// The half of a 64-bit word that names the loop; x86 stores the lower half first.
const void* upper_half(const std::atomic<uint64_t>& word) {
  return reinterpret_cast<const char*>(&word) + 4;
}

}  // namespace

Workers* Workers::start(int threads) {
  auto* workers = new (std::nothrow) Workers(1);
  if (workers == nullptr) return nullptr;
  workers->process_ = getpid();
  workers->seats_ = new (std::nothrow) Seat[threads];
  for (int thread = 1; workers->seats_ != nullptr && thread < threads; thread++) {
    Seat& seat = workers->seats_[thread];
    seat.workers = workers;
    seat.thread = thread;
    if (pthread_create(&seat.handle, nullptr, &enter, &seat) != 0) break;
    workers->threads_ = thread + 1;
  }
  if (workers->threads_ == threads) return workers;
  delete workers;
  return nullptr;
}

Workers::~Workers() {
  if (usable()) {
    stopping_.store(true);
    word_.fetch_add(uint64_t{1} << 32);
    wake(upper_half(word_), threads_);
    for (int thread = 1; thread < threads_; thread++) pthread_join(seats_[thread].handle, nullptr);
  }
  delete[] seats_;
}

bool Workers::usable() const { return getpid() == process_; }

void* Workers::enter(void* seat) {
  auto* own = static_cast<Seat*>(seat);
  own->workers->work(own->thread);
  return nullptr;
}

void Workers::run(int count, bool even, Call call, const void* body) {
  if (threads_ == 1 || count < 2) {
    for (int item = 0; item < count; item++) call(body, item, 0);
    return;
  }
  call_ = call;
  body_ = body;
  count_ = static_cast<uint32_t>(count);
  finished_.store(0, std::memory_order_relaxed);
  uint64_t number = (word_.load(std::memory_order_relaxed) >> 32) + 1;
  uint64_t word = number << 32 | (even ? kEven : 0u) | count_;
  word_.store(word);
  if (sleeping_.load() != 0) wake(upper_half(word_), threads_);
  while (take(word_.load(std::memory_order_relaxed), 0)) {
  }
  wait_for_end(count_);
}

// Takes some items of the loop that `word` was read from and runs them. False if none were
// left; true also if another thread was quicker.
bool Workers::take(uint64_t word, int thread) {
  auto lower = static_cast<uint32_t>(word);
  uint32_t left = lower & ~kEven;
  if (left == 0) return false;
  uint32_t taken = lower & kEven ? std::max(1u, left / (2u * threads_)) : 1u;
  if (!word_.compare_exchange_strong(word, word - taken)) return true;
  uint32_t count = count_, first = count - left;
  for (uint32_t item = first; item < first + taken; item++) {
    call_(body_, static_cast<int>(item), thread);
  }
  // After the last item the caller may go on: nothing of the loop is touched below.
  if (finished_.fetch_add(taken) + taken == count && caller_sleeps_.load() != 0) {
    wake(&finished_, 1);
  }
  return true;
}

void Workers::wait_for_end(uint32_t count) {
  auto ended = [&] { return finished_.load(std::memory_order_acquire) == count; };
  if (spin_until(ended)) return;
  caller_sleeps_.store(1);
  for (uint32_t finished; (finished = finished_.load()) != count;) {
    sleep_while(&finished_, finished);
  }
  caller_sleeps_.store(0);
}

void Workers::wait_for_items(uint64_t word) {
  auto number = static_cast<uint32_t>(word >> 32);
  auto another = [&] {
    return static_cast<uint32_t>(word_.load(std::memory_order_acquire) >> 32) != number;
  };
  if (spin_until(another)) return;
  sleeping_.fetch_add(1);
  while (!another()) sleep_while(upper_half(word_), number);
  sleeping_.fetch_sub(1);
}

void Workers::work(int thread) {
  while (!stopping_.load(std::memory_order_relaxed)) {
    uint64_t word = word_.load(std::memory_order_acquire);
    if (!take(word, thread)) wait_for_items(word);
  }
}

}  // namespace noria
