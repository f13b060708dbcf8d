// Staging memory that UCX knows: the rings that peers get from, and the slots that our own gets fill.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "channel.hpp"
#include "packer.hpp"
#include "staging.hpp"
#include "ucx_context.hpp"

namespace kvlink {

class UcxSlots {
 public:
  // Throws std::runtime_error: no memory, or UCX does not take it.
  UcxSlots(std::shared_ptr<UcxContext> context, Packer& packer, std::size_t slots);

  Slots& slots() { return slots_; }
  const UcxRegion& region() const { return region_; }
  // What a peer needs to get from it: the address, then the packed key.
  Bytes handle() const;
  // The reverse; `bytes` is how long the ring is. Throws ProtocolViolation on what can be none.
  static RemoteKey from_handle(std::span<const std::byte> handle, std::uint64_t bytes);

 private:
  std::unique_ptr<StagingMemory> memory_;
  UcxRegion region_;
  Slots slots_;
};

// Rings are lent to peers, one each, and never unmapped while the engine lives: where UCX answers gets in software, it
// reads whatever address it is told, and a peer that we have lost may still be telling it ours. What such a peer reads
// of a ring that was lent again is as worthless as any byte read after its lease.
class UcxRings {
 public:
  UcxRings(std::shared_ptr<UcxContext> context, std::shared_ptr<Packer> packer, std::size_t slots, std::size_t most)
      : context_(std::move(context)), packer_(std::move(packer)), slots_(slots), most_(most) {}

  // Throws std::runtime_error, saying what is short.
  std::unique_ptr<UcxSlots> lend();
  void take_back(std::unique_ptr<UcxSlots> ring) { idle_.push_back(std::move(ring)); }

 private:
  const std::shared_ptr<UcxContext> context_;
  const std::shared_ptr<Packer> packer_;
  const std::size_t slots_;
  const std::size_t most_;
  std::size_t made_ = 0;
  std::vector<std::unique_ptr<UcxSlots>> idle_;
};

}  // namespace kvlink
