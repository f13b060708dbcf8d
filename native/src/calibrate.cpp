#include "calibrate.hpp"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>
#include <vector>

#include "asked_read.hpp"
#include "iovecs.hpp"
#include "shared_memory.hpp"
#include "threads.hpp"

namespace kvlink {
namespace {

Descriptor checked(int fd) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "no TCP connection of this host with itself");
  return Descriptor(fd);
}

void require(bool good) {
  if (!good) throw std::system_error(errno, std::generic_category(), "no TCP connection of this host with itself");
}

std::pair<Descriptor, Descriptor> connected() {
  const Descriptor listener = checked(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
  socklen_t length = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  require(bind(listener.fd(), generic, length) == 0 && listen(listener.fd(), 1) == 0 &&
          getsockname(listener.fd(), generic, &length) == 0);
  Descriptor sender = checked(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  require(setsockopt(sender.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0 &&
          connect(sender.fd(), generic, length) == 0);
  return {std::move(sender), checked(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC))};
}

constexpr std::size_t kLineBytes = 64;

}  // namespace

void evict(const std::byte* data, std::size_t bytes) {
  for (const std::byte* line = data; line < data + bytes; line += kLineBytes) {
#if defined(__x86_64__)
    __builtin_ia32_clflush(line);
#elif defined(__aarch64__)
    asm volatile("dc civac, %0" : : "r"(line) : "memory");
#endif
  }
  // Until all of it is out. Not a fence of the language's: that orders threads, and ThreadSanitizer knows none.
#if defined(__x86_64__)
  __builtin_ia32_mfence();
#elif defined(__aarch64__)
  asm volatile("dsb sy" : : : "memory");
#endif
}

SocketCost socket_cost(const Plan& plan, std::span<const std::byte* const> sources,
                       std::span<std::byte* const> targets) {
  const auto [sender, receiver] = connected();
  const std::vector<const std::byte*> into(targets.begin(), targets.end());
  Cursor source(plan, 0, plan.total_bytes(), Walk::source);
  Cursor target(plan, 0, plan.total_bytes(), Walk::target);
  const std::int64_t runs_a_call = kMaxAskBytes * plan.count_runs() / std::max(plan.total_bytes(), std::int64_t{1});
  const auto call = static_cast<std::size_t>(std::clamp<std::int64_t>(runs_a_call, 1, Iovecs::kMax));
  const std::size_t keep = Iovecs::kMax - call;
  Iovecs out;
  Iovecs in;
  std::chrono::nanoseconds sending{};
  std::chrono::nanoseconds receiving{};
  for (std::int64_t received = 0; received < plan.total_bytes();) {
    const auto began = thread_ran();
    if (out.empty()) out.add_runs(source, Side::source, sources, keep);
    const msghdr leaving = out.message();
    const ssize_t sent = sendmsg(sender.fd(), &leaving, MSG_NOSIGNAL | MSG_DONTWAIT);
    require(sent > 0);
    out.consume(static_cast<std::size_t>(sent));
    const auto left = thread_ran();
    sending += left - began;
    for (ssize_t rest = sent; rest > 0;) {
      if (in.empty()) in.add_runs(target, Side::target, into, keep);
      msghdr coming = in.message();
      const ssize_t got = recvmsg(receiver.fd(), &coming, 0);
      require(got > 0);
      in.consume(static_cast<std::size_t>(got));
      rest -= got;
      received += got;
    }
    receiving += thread_ran() - left;
  }
  return {std::chrono::duration<double>(sending).count(), std::chrono::duration<double>(receiving).count()};
}

}  // namespace kvlink
