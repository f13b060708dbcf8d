// Target side on one host: one read, and which of the two ways its bytes come.
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
#include "shared_wire.hpp"

namespace kvlink {

// What is known of a region of a peer's. The mapping is the engine's thread's own.
struct SharedRegion {
  std::uint64_t bytes;
  bool mappable;  // the peer says so
  mutable std::shared_ptr<const PeerMemory> memory = nullptr;
  mutable bool refused = false;  // it said so, and could not
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
  bool is_mapped() const { return !sources_.empty(); }
  std::span<const std::byte* const> sources() const { return sources_; }
  // Mapped, without digests: the next stretch, on whatever thread.
  Copied copy_some() noexcept override;
  // How its bytes come, and why: for its completion.
  void say(const char* path, std::string reason) {
    path_ = path;
    path_reason_ = std::move(reason);
  }
  Completion completion() const override;

 private:
  const std::shared_ptr<const RemoteRegions> from_;
  std::vector<std::size_t> needed_;
  std::vector<const std::byte*> sources_;
  std::vector<std::shared_ptr<const PeerMemory>> mappings_;
  const char* path_ = "";
  std::string path_reason_;
};

}  // namespace kvlink
