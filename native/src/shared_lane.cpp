#include "shared_lane.hpp"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace kvlink {
namespace {

constexpr std::size_t kMaxFilesPerFrame = 2;

[[noreturn]] void broke() { throw std::runtime_error(std::string("lane broke: ") + strerror(errno)); }

}  // namespace

SharedLane::SharedLane(int fd) : socket_(fd) {
  int domain = 0;
  int type = 0;
  socklen_t length = sizeof domain;
  const bool known = getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) == 0 &&
                     getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) == 0;
  if (!known || domain != AF_UNIX || type != SOCK_STREAM) {
    throw std::runtime_error("the lane of two ends on one host must be a Unix stream socket");
  }
}

void SharedLane::send(const Telling& telling, std::initializer_list<int> files) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxFilesPerFrame * sizeof(int))> control{};
  iovec data{const_cast<Telling*>(&telling), sizeof telling};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (files.size() > 0) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(files.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(files.size() * sizeof(int));
    memcpy(CMSG_DATA(header), std::data(files), files.size() * sizeof(int));
  }
  const ssize_t sent = sendmsg(socket_.fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent == sizeof telling) return;
  if (sent >= 0 || errno == EAGAIN || errno == EWOULDBLOCK) throw std::runtime_error("the peer does not read its lane");
  broke();
}

void SharedLane::ring() {
  const Telling bell{.tell = Tell::bell};
  const ssize_t sent = ::send(socket_.fd(), &bell, sizeof bell, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent == sizeof bell || (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))) return;
  if (sent >= 0) throw std::runtime_error("the peer does not read its lane");
  broke();
}

std::optional<Telling> SharedLane::receive() {
  if (held_ - used_ < sizeof(Telling) && !fill()) return std::nullopt;
  Telling telling;
  memcpy(&telling, in_.data() + used_, sizeof telling);
  used_ += sizeof telling;
  return telling;
}

// True once a whole frame is here. A call never goes past a frame that has files, so those that are here are its.
bool SharedLane::fill() {
  std::copy(in_.begin() + static_cast<std::ptrdiff_t>(used_), in_.begin() + static_cast<std::ptrdiff_t>(held_),
            in_.begin());
  held_ -= std::exchange(used_, 0);
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxFilesPerFrame * sizeof(int))> control;
  iovec data{in_.data() + held_, in_.size() - held_};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got = recvmsg(socket_.fd(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got == 0) throw std::runtime_error("lane closed by the peer");
  if (got < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return false;
    broke();
  }
  held_ += static_cast<std::size_t>(got);
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd;
      memcpy(&fd, CMSG_DATA(header) + i * sizeof fd, sizeof fd);
      files_.emplace_back(fd);
    }
  }
  if ((message.msg_flags & MSG_CTRUNC) || files_.size() > kMaxFiles) {
    throw ProtocolViolation("files on the lane that nobody asked for");
  }
  return held_ >= sizeof(Telling);
}

Descriptor SharedLane::take_file() {
  if (files_.empty()) throw ProtocolViolation("a frame on the lane without its file");
  Descriptor file = std::move(files_.front());
  files_.pop_front();
  return file;
}

}  // namespace kvlink
