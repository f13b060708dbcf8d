#include "ucx_staging.hpp"

#include <cstring>
#include <stdexcept>
#include <utility>

namespace kvlink {

UcxSlots::UcxSlots(std::shared_ptr<UcxContext> context, Packer& packer, std::size_t slots)
    : memory_(packer.staging(slots * static_cast<std::size_t>(kSlotBytes))),
      region_(std::move(context), reinterpret_cast<std::uint64_t>(memory_->data()), memory_->bytes()),
      slots_(memory_->data(), slots) {}

Bytes UcxSlots::handle() const {
  const std::uint64_t address = region_.address();
  Bytes handle(sizeof address);
  std::memcpy(handle.data(), &address, sizeof address);
  const Bytes key = region_.pack_key();
  handle.insert(handle.end(), key.begin(), key.end());
  return handle;
}

RemoteKey UcxSlots::from_handle(std::span<const std::byte> handle, std::uint64_t bytes) {
  std::uint64_t address = 0;
  if (handle.size() <= sizeof address) throw ProtocolViolation("ring without a key");
  std::memcpy(&address, handle.data(), sizeof address);
  if (address + bytes < address) throw ProtocolViolation("ring that ends beyond all memory");
  const auto key = handle.subspan(sizeof address);
  return {address, bytes, Bytes(key.begin(), key.end())};
}

std::unique_ptr<UcxSlots> UcxRings::lend() {
  if (idle_.empty()) {
    if (made_ == most_) throw std::runtime_error("all " + std::to_string(most_) + " rings are lent");
    auto ring = std::make_unique<UcxSlots>(context_, *packer_, slots_);
    ++made_;
    return ring;
  }
  auto ring = std::move(idle_.back());
  idle_.pop_back();
  return ring;
}

}  // namespace kvlink
