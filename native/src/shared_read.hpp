// Target side on one host: one read, and which of the three ways its bytes come.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "asked_read.hpp"
#include "copy_pool.hpp"
#include "engine_core.hpp"
#include "shared_memory.hpp"
#include "shared_process.hpp"
#include "shared_pull.hpp"
#include "shared_wire.hpp"

namespace kvlink {

// What is known of a region of a peer's. All but the first two are the engine's thread's own.
struct SharedRegion {
  std::uint64_t bytes;
  bool mappable;  // the peer says so
  mutable std::shared_ptr<const PeerMemory> memory = nullptr;
  mutable bool refused = false;  // it said so, and could not
  mutable std::uint64_t address = 0;  // in the peer's process; 0: not asked for yet
  mutable bool nowhere = false;       // it was, and the peer has no such region
};

class SharedRead final : public AskedRead, public CopyWork {
 public:
  SharedRead(ReadSpec spec, std::shared_ptr<const LocalRegions> to, std::shared_ptr<const RemoteRegions> from);

  // The regions of the peer's that the plan names, by number.
  std::span<const std::size_t> source_regions() const { return needed_; }
  const SharedRegion& source_region(std::size_t region) const {
    return *static_cast<const SharedRegion*>(from_->held[region].get());
  }

  std::shared_ptr<const SharedRegion> hold_source_region(std::size_t region) const {
    return std::static_pointer_cast<const SharedRegion>(from_->held[region]);
  }

  // Mapped: where the peer's bytes lie, by region number; once all that is needed is mapped. It stays so until the
  // read's end, whatever becomes of the peer.
  void mapped();
  // Pulled: out of this process, once it is known where all that is needed lies there.
  void pulled(std::shared_ptr<const PeerProcess> process);
  // Unanswered or not yet brought in, at a time. Pulled: the source, which hashes what is read next, is kept just
  // ahead, so that what it has read is still in its core's cache (these two loops alone: 15.2 GB/s with 8, 17.0 with
  // 2).
  std::uint32_t max_asks() const { return process_ != nullptr ? 2 : kRingSlots; }
  // Either of the two: nothing but digests is asked of the source.
  bool brings_itself_in() const { return process_ != nullptr || !sources_.empty(); }
  // A stretch of it, into our blocks, with digests of what was written if `leaves` are given. False if that failed: the
  // read is stopped, with the reason. Any thread, within enter() and exit().
  bool bring_in(Stretch stretch, std::span<std::uint64_t> leaves);
  // Without digests: the next stretch, on whatever thread.
  Copied copy_some() noexcept override;
  // How its bytes come, and why: for its completion.
  void say(const char* path, std::string reason) {
    path_ = path;
    path_reason_ = std::move(reason);
  }
  Completion completion() const override;

 private:
  bool pull_in(Stretch stretch, std::span<std::uint64_t> leaves);

  const std::shared_ptr<const RemoteRegions> from_;
  std::vector<std::size_t> needed_;
  std::vector<const std::byte*> sources_;
  std::vector<std::shared_ptr<const PeerMemory>> mappings_;
  std::shared_ptr<const PeerProcess> process_;
  std::vector<FarRegion> far_;
  const char* path_ = "";
  std::string path_reason_;
};

}  // namespace kvlink
