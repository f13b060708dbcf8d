#include "stream_lane.hpp"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <stdexcept>
#include <utility>

namespace kvlink {
namespace {

// What waits in a socket between two processes of one host is taken out again while it is in the cache: 10.2 GB/s over
// two lanes of two cores, 9.3 with the megabytes that the kernel lets a far sender fill. (Half of it, or a short buffer
// at the sender: slower.)
constexpr int kNearBufferBytes = 384 * 1024;

bool is_within_host(int fd) {
  sockaddr_storage ours{}, theirs{};
  socklen_t length = sizeof ours, their_length = sizeof theirs;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&ours), &length) < 0 ||
      getpeername(fd, reinterpret_cast<sockaddr*>(&theirs), &their_length) < 0 ||
      ours.ss_family != theirs.ss_family) {
    return false;
  }
  if (ours.ss_family == AF_INET) {
    return reinterpret_cast<sockaddr_in&>(ours).sin_addr.s_addr ==
           reinterpret_cast<sockaddr_in&>(theirs).sin_addr.s_addr;
  }
  return ours.ss_family == AF_INET6 && IN6_ARE_ADDR_EQUAL(&reinterpret_cast<sockaddr_in6&>(ours).sin6_addr,
                                                          &reinterpret_cast<sockaddr_in6&>(theirs).sin6_addr);
}

}  // namespace

Lane::Lane(int fd) : fd_(fd) {
  const int on = 1;
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // a Unix socket refuses this, and needs none
  if (is_within_host(fd_)) setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &kNearBufferBytes, sizeof kNearBufferBytes);
  int type = 0;
  socklen_t length = sizeof type;
  if (getsockopt(fd_, SOL_SOCKET, SO_TYPE, &type, &length) < 0 || type != SOCK_STREAM) {
    ::close(std::exchange(fd_, -1));
    throw std::runtime_error("a lane must be a stream socket");
  }
}

Lane::~Lane() { close(); }

void Lane::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  if (landing_) landing_->abandon();
  closed_.store(true, std::memory_order_release);
}

void Lane::join(std::string peer, Exposures& exposures, std::shared_ptr<Demand> demand, std::shared_ptr<Pace> pace) {
  peer_ = std::move(peer);
  turns_ = Turns(std::move(pace));
  demand_ = std::move(demand);
  serving_ = std::make_unique<Serving>(exposures, peer_);
  landing_ = std::make_unique<Landing>(*demand_);
}

Lane::Received Lane::receive(std::span<std::byte> scratch) {
  auto heard = landing_->step(fd_, scratch);
  if (heard.ask) serving_->accept(*heard.ask);
  if (heard.answered) ask();
  return {heard.step, heard.over};
}

LaneStep Lane::send() { return serving_->step(fd_); }

bool Lane::ask() {
  while (demand_->any() && turns_.may_ask()) {
    auto next = demand_->take(landing_->unanswered());
    if (!next) break;
    turns_.asked(next->stretch.end - next->stretch.begin);
    const ReadSpec& spec = next->read->spec();
    serving_->ask({.word = LaneWord::ask,
                   .digests = static_cast<std::uint16_t>(spec.integrity ? 1 : 0),
                   .attempt = spec.attempt,
                   .begin = next->stretch.begin,
                   .end = next->stretch.end});
    landing_->asked(std::move(*next));
  }
  ask_at_ = turns_.put_off_until();
  return !serving_->idle();
}

}  // namespace kvlink
