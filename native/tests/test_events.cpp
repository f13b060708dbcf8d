// Commands and completions between two threads: nothing is lost, order is kept, and the descriptors tell.
#include "events.hpp"

#include <poll.h>

#include <thread>

#include "check.hpp"

using namespace kvlink;

namespace {

bool readable(int fd, int timeout_ms) {
  pollfd waiting{fd, POLLIN, 0};
  return poll(&waiting, 1, timeout_ms) == 1;
}

void completions_wake_whoever_waits_as_told() {
  constexpr std::uint64_t kCount = 20'000;
  CompletionQueue queue;
  std::thread producer([&queue] {
    for (std::uint64_t op = 1; op <= kCount; ++op) queue.push({.kind = CompletionKind::read, .op = op, .peer = "peer"});
  });
  std::uint64_t last = 0;
  while (last < kCount) {
    if (queue.arm()) CHECK(readable(queue.fd(), 10'000));
    const auto popped = queue.pop(7);
    CHECK(popped.size() <= 7);
    for (const Completion& completion : popped) CHECK(completion.op == ++last);
  }
  producer.join();
  CHECK(queue.arm());
  CHECK(!readable(queue.fd(), 0));
}

void commands_come_in_order() {
  constexpr int kCount = 20'000;
  CommandQueue<int> queue;
  std::thread producer([&queue] {
    for (int i = 1; i <= kCount; ++i) queue.push(i);
  });
  int last = 0;
  std::vector<int> taken;
  while (last < kCount) {
    CHECK(readable(queue.fd(), 10'000));
    queue.take(taken);
    for (const int command : taken) CHECK(command == ++last);
    taken.clear();
  }
  producer.join();
  queue.take(taken);  // the last signal may have come after its command was taken
  CHECK(taken.empty() && !readable(queue.fd(), 0));
}

void what_nobody_waits_for_wakes_nobody() {
  CommandQueue<int> queue;
  queue.push_unhurried(1);
  CHECK(!readable(queue.fd(), 0));
  queue.push(2);
  CHECK(readable(queue.fd(), 0));
  std::vector<int> taken;
  queue.take(taken);
  CHECK((taken == std::vector{1, 2}) && !readable(queue.fd(), 0));
}

}  // namespace

int main() {
  completions_wake_whoever_waits_as_told();
  commands_come_in_order();
  what_nobody_waits_for_wakes_nobody();
}
