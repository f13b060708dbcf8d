#include "memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <shared_mutex>

namespace fakecuda {
namespace {

constexpr std::size_t kDeviceBytes = std::size_t{64} << 30;  // of addresses; memory is taken as it is written
constexpr std::size_t kGranule = 4096;
constexpr int kIllegalAddress = 700;
constexpr int kMisalignedAddress = 716;

struct Device {
  Device() {
    const int file = memfd_create("fakecuda", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(kDeviceBytes)) != 0) std::abort();
    const auto map = [file](int access) {
      void* at = mmap(nullptr, kDeviceBytes, access, MAP_SHARED | MAP_NORESERVE, file, 0);
      if (at == MAP_FAILED) std::abort();
      return static_cast<std::byte*>(at);
    };
    addresses = map(PROT_NONE);
    bytes = map(PROT_READ | PROT_WRITE);
    fd = file;
  }
  bool holds(std::uint64_t address) const {
    const auto first = reinterpret_cast<std::uintptr_t>(addresses);
    return address >= first && address < first + kDeviceBytes;
  }

  std::byte* addresses;
  std::byte* bytes;
  int fd;
  std::size_t next = 0;  // addresses are not used again: what is used after it was freed is found out
};

Device& device() {
  static Device* const only = new Device;  // outlives every thread
  return *only;
}

struct Allocation {
  std::size_t bytes;
  bool pinned;
};

std::shared_mutex mutex;
std::map<std::uint64_t, Allocation> live;
std::atomic<std::uint64_t> generation{1};  // changes when anything is freed

struct Found {
  std::uint64_t generation = 0;
  std::uint64_t first = 0;
  std::uint64_t end = 0;
};

Found find(std::uint64_t address) {
  const std::shared_lock lock(mutex);
  const auto after = live.upper_bound(address);
  if (after == live.begin()) return {};
  const auto& [first, allocation] = *std::prev(after);
  if (address >= first + allocation.bytes) return {};
  return {generation.load(), first, first + allocation.bytes};
}

}  // namespace

std::uint64_t allocate_device(std::size_t bytes) {
  const std::unique_lock lock(mutex);
  Device& it = device();
  const std::size_t taken = (bytes / kGranule + 2) * kGranule;  // an unused granule between any two
  if (bytes == 0 || taken > kDeviceBytes - it.next) return 0;
  std::memset(it.bytes + it.next, kPoison, bytes);
  const auto address = reinterpret_cast<std::uintptr_t>(it.addresses + it.next);
  it.next += taken;
  live[address] = {bytes, false};
  return address;
}

bool free_device(std::uint64_t address) {
  const std::unique_lock lock(mutex);
  const auto found = live.find(address);
  if (found == live.end() || found->second.pinned) return false;
  const Device& it = device();
  const auto offset = static_cast<off_t>(address - reinterpret_cast<std::uintptr_t>(it.addresses));
  fallocate(it.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, static_cast<off_t>(found->second.bytes));
  live.erase(found);
  ++generation;
  return true;
}

void* allocate_pinned(std::size_t bytes) {
  void* memory = nullptr;
  if (bytes == 0 || posix_memalign(&memory, kGranule, bytes) != 0) return nullptr;
  std::memset(memory, kPoison, bytes);
  const std::unique_lock lock(mutex);
  live[reinterpret_cast<std::uintptr_t>(memory)] = {bytes, true};
  return memory;
}

bool free_pinned(void* memory) {
  {
    const std::unique_lock lock(mutex);
    const auto found = live.find(reinterpret_cast<std::uintptr_t>(memory));
    if (found == live.end() || !found->second.pinned) return false;
    std::memset(memory, kPoison, found->second.bytes);
    live.erase(found);
    ++generation;
  }
  std::free(memory);
  return true;
}

Kind kind_of(std::uint64_t address) {
  if (find(address).end == 0) return Kind::unknown;
  return device().holds(address) ? Kind::device : Kind::pinned;
}

void* bytes_at(std::uint64_t address, std::size_t bytes, std::size_t alignment) {
  // An allocation is asked for again and again: two are remembered, a source's and a target's.
  thread_local Found known[2];
  const auto inside = [&](const Found& found) {
    return found.generation == generation.load(std::memory_order_acquire) && address >= found.first &&
           address + bytes <= found.end;
  };
  if (!inside(known[0])) {
    std::swap(known[0], known[1]);
    if (!inside(known[0])) known[0] = find(address);
    if (!inside(known[0])) throw IllegalAccess{kIllegalAddress};
  }
  if (address % alignment != 0) throw IllegalAccess{kMisalignedAddress};
  const Device& it = device();
  if (!it.holds(address)) return reinterpret_cast<void*>(address);
  return it.bytes + (address - reinterpret_cast<std::uintptr_t>(it.addresses));
}

Counts live_memory() {
  const std::shared_lock lock(mutex);
  Counts counts{};
  for (const auto& [address, allocation] : live) ++(allocation.pinned ? counts.pinned : counts.device);
  return counts;
}

}  // namespace fakecuda
