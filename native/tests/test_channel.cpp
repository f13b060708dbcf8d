// The native channel: frames arrive whole whatever the pieces, its queue is bounded, and noise only ever ends it.
#include "channel.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"

using namespace kvlink;

namespace {

std::string line(const char* what, std::initializer_list<std::uint64_t> words) {
  std::string text = what;
  for (const auto word : words) text.append(1, ' ').append(std::to_string(word));
  return text;
}

class Log final : public FrameSink {
 public:
  std::vector<std::string> lines;

  void on_heartbeat(std::span<const AttemptId> renewed) override {
    lines.push_back(line("heartbeat", {renewed.size(), renewed.empty() ? 0 : renewed.back()}));
  }
  void on_want(AttemptId attempt) override { lines.push_back(line("want", {attempt})); }
  void on_leaves(AttemptId attempt, std::uint64_t first, std::span<const std::uint64_t> digests) override {
    lines.push_back(line("leaves", {attempt, first, digests.size(), digests.back()}));
  }
  void on_failed(AttemptId attempt, FailReason reason) override {
    lines.push_back(line("failed", {attempt, static_cast<std::uint64_t>(reason)}));
  }
  void on_ring_wanted(std::uint64_t slots) override { lines.push_back(line("ring wanted", {slots})); }
  void on_ring(const RingOffer& offer) override {
    const std::string handle(reinterpret_cast<const char*>(offer.handle.data()), offer.handle.size());
    lines.push_back(line("ring", {offer.slots, offer.slot_bytes}) + " " + handle);
  }
  void on_pack(const PackAsk& ask) override {
    lines.push_back(line("pack", {ask.attempt, static_cast<std::uint64_t>(ask.begin),
                                  static_cast<std::uint64_t>(ask.end), ask.slot, ask.digests ? 1u : 0u}));
  }
  void on_packed(const PackAnswer& answer) override {
    lines.push_back(line("packed", {answer.attempt, static_cast<std::uint64_t>(answer.begin), answer.slot,
                                    answer.reason, answer.digests.size()}));
  }
};

std::pair<int, int> sockets() {
  int fds[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
  return {fds[0], fds[1]};
}

void frames_arrive_as_sent() {
  const auto [a, b] = sockets();
  Channel sender(a);
  Channel receiver(b);
  std::vector<AttemptId> attempts(2500);
  for (std::size_t i = 0; i < attempts.size(); ++i) attempts[i] = i;
  const std::vector<std::uint64_t> digests(Channel::kMaxDigestsPerFrame, 7);

  sender.heartbeat({});
  sender.heartbeat(attempts);
  sender.want(~0ull);
  sender.leaves(3, 9, digests);
  sender.failed(4, FailReason::withdrawn);
  sender.ring_wanted(8);
  sender.ring({8, 512, std::as_bytes(std::span("a handle", 8))});
  sender.ring({0, 512, std::as_bytes(std::span("nine long", 9))});
  sender.ring({});
  sender.pack({5, 1 << 14, 1 << 20, 3, true});
  sender.packed({5, 1 << 14, 3, 0, std::span(digests).first(2)});
  sender.packed({5, 1 << 14, 3, 2, {}});
  Log log;
  while (sender.wants_write() || log.lines.size() < 14) {
    sender.flush();
    receiver.receive(log);
    CHECK(receiver.end().empty());
  }
  const std::vector<std::string> expected = {
      "heartbeat 0 0",    "heartbeat 1024 1023",   "heartbeat 1024 2047", "heartbeat 452 2499",
      line("want", {~0ull}), "leaves 3 9 4096 7", "failed 4 3", "ring wanted 8",
      "ring 8 512 a handle", "ring 0 512 nine long", "ring 0 0 ", "pack 5 16384 1048576 3 1", "packed 5 16384 3 0 2",
      "packed 5 16384 3 2 0"};
  CHECK(log.lines == expected);
}

// Heartbeats to a peer that does not read are dropped; what must not be dropped ends the channel.
void the_queue_is_bounded() {
  const auto [a, b] = sockets();
  Channel sender(a);
  for (int i = 0; i < 1'000'000 && sender.has_room_for_digests(); ++i) sender.want(1);
  CHECK(!sender.has_room_for_digests());
  CHECK(sender.end().empty());
  const std::vector<AttemptId> attempts(Channel::kMaxAttemptsPerHeartbeat);
  for (int i = 0; i < 1000; ++i) sender.heartbeat(attempts);
  CHECK(sender.end().empty());
  for (int i = 0; i < 1'000'000 && sender.end().empty(); ++i) sender.want(1);
  CHECK(sender.end() == "the peer does not read its channel");
  close(b);
}

void a_closed_peer_ends_it() {
  const auto [a, b] = sockets();
  Channel channel(a);
  close(b);
  Log log;
  CHECK(!channel.receive(log));
  CHECK(channel.end() == "channel closed by the peer");
  Channel none(-1);
  CHECK(!none.end().empty());
}

std::string end_of(std::initializer_list<std::uint64_t> frame) {
  const auto [a, b] = sockets();
  Channel channel(a);
  const std::vector<std::uint64_t> words(frame);
  CHECK(write(b, words.data(), 8 * words.size()) == static_cast<ssize_t>(8 * words.size()));
  Log log;
  channel.receive(log);
  CHECK(log.lines.empty());
  close(b);
  return channel.end();
}

void frames_of_packing_that_no_peer_sends_end_it() {
  const auto header = [](std::uint64_t type, std::uint64_t words) { return type | words * 8 << 32; };
  const std::string start = "protocol violation on the channel: ";
  CHECK(end_of({header(5, 2), 1, 1}) == start + "wish for a ring of the wrong size");
  CHECK(end_of({header(6, 2), 1, 1}) == start + "ring that miscounts its handle");
  CHECK(end_of({header(6, 4), 1, 1, 9, 0}) == start + "ring that miscounts its handle");
  CHECK(end_of({header(6, 3), 1, 1, ~0ull}) == start + "ring that miscounts its handle");
  CHECK(end_of({header(7, 4), 1, 0, 16384, 0}) == start + "pack of the wrong size");
  CHECK(end_of({header(7, 5), 1, 0, 16384, 0, 2}) == start + "pack of the wrong size");
  CHECK(end_of({header(8, 3), 1, 0, 0}) == start + "packed of the wrong size");
  CHECK(end_of({header(8, 4), 1, 0, 0, 1ull << 32}) == start + "packed of the wrong size");
  CHECK(end_of({header(9, 1), 1}) == start + "unknown frame type 9");
}

// Noise, with true headers now and then so that it gets past them.
void noise_only_ends_it(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto [a, b] = sockets();
  Channel channel(a);
  Log log;
  std::vector<unsigned char> noise;
  while (noise.size() < 4096) {
    const std::uint64_t words = random() % 6;
    const std::uint64_t type = random() % 8 == 0 ? random() % 65536 : 1 + random() % 8;
    for (const std::uint64_t part : {type, type >> 8, std::uint64_t{0}, std::uint64_t{0}, words * 8, std::uint64_t{0},
                                     std::uint64_t{0}, std::uint64_t{0}}) {
      noise.push_back(static_cast<unsigned char>(part));
    }
    for (std::uint64_t i = 0; i < words * 8; ++i) noise.push_back(random() % 3 == 0 ? random() & 0xff : 0);
  }
  for (std::size_t at = 0; at < noise.size() && channel.end().empty();) {
    const std::size_t count = std::min<std::size_t>(1 + random() % 64, noise.size() - at);
    CHECK(write(b, noise.data() + at, count) == static_cast<ssize_t>(count));
    channel.receive(log);
    at += count;
  }
  CHECK(log.lines.size() < 1000);
  close(b);
}

}  // namespace

int main() {
  frames_arrive_as_sent();
  the_queue_is_bounded();
  a_closed_peer_ends_it();
  frames_of_packing_that_no_peer_sends_end_it();
  for (std::uint64_t seed = 0; seed < 300; ++seed) noise_only_ends_it(seed);
}
