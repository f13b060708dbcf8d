#include "shared_process.hpp"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <system_error>

namespace kvlink {
namespace {

constexpr const char* kForbidden =
    "the kernel does not let this process read the source's memory (kvlink doctor says what forbids it)";

std::string message_of(int error) { return std::generic_category().message(error); }

}  // namespace

// --- ours -----------------------------------------------------------------------------------------------------------

Nonce::Nonce() {
  const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* page = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "a page for a nonce");
  page_ = static_cast<std::uint64_t*>(page);
  madvise(page, bytes, MADV_WIPEONFORK);  // Linux 4.14; a fork has another number, too
  while (*page_ == 0) {
    if (getrandom(page_, sizeof *page_, 0) != sizeof *page_) {
      munmap(page, bytes);
      throw std::system_error(errno, std::generic_category(), "a nonce");
    }
  }
}

Nonce::~Nonce() { munmap(page_, static_cast<std::size_t>(sysconf(_SC_PAGESIZE))); }

// --- the peer's -----------------------------------------------------------------------------------------------------

// Its end of the lane is open after the process's descriptor was: so the descriptor is not of a later process.
PeerProcess::PeerProcess(int lane_fd) : lane_(fcntl(lane_fd, F_DUPFD_CLOEXEC, 0)) {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (!lane_ || getsockopt(lane_fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) < 0) {
    refusal_ = "the source's process is not known: " + message_of(errno);
    return;
  }
  if (peer.pid <= 0) {
    refusal_ = "the source's process is in a pid namespace that this one does not see";
    return;
  }
  pid_ = peer.pid;
  process_ = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
  if (!process_) {
    refusal_ = "the source's process cannot be held on to (Linux 5.3): " + message_of(errno);
  } else if (!is_there()) {
    refusal_ = "the source's process has ended";
  }
}

bool PeerProcess::is_there() const {
  pollfd ends[] = {{process_.fd(), POLLIN, 0}, {lane_.fd(), POLLRDHUP, 0}};
  int ready;
  do {
    ready = poll(ends, 2, 0);
  } while (ready < 0 && errno == EINTR);
  return ready == 0;
}

// Told by the peer, but read where the kernel says that it lives: another process does not have the number.
void PeerProcess::prove(std::uint64_t address, std::uint64_t nonce) {
  if (!refusal_.empty()) return;
  std::uint64_t found = 0;
  const iovec here{&found, sizeof found};
  const iovec there{reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)), sizeof found};
  const ssize_t got = process_vm_readv(pid_, &here, 1, &there, 1, 0);
  if (got < 0 && errno == EPERM) {
    refusal_ = kForbidden;
  } else if (got < 0 && errno != EFAULT) {
    refusal_ = "the source's memory cannot be read: " + message_of(errno);
  } else if (got != sizeof found || nonce == 0 || found != nonce) {
    refusal_ = "process " + std::to_string(pid_) + ", which opened the lane, is not the source";
  } else if (!is_there()) {
    refusal_ = "the source's process has ended";
  } else {
    proven_ = true;
  }
}

std::string PeerProcess::refusal() const {
  return forbidden_.load(std::memory_order_relaxed) ? kForbidden : refusal_;
}

}  // namespace kvlink
