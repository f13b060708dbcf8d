// Target side of packed transfers from one peer: asks for stretches into the slots of the peer's ring, and scatters
// what comes back. How a slot's bytes get here is the transport's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "asked_read.hpp"
#include "channel.hpp"
#include "pace.hpp"
#include "packer.hpp"

namespace kvlink {

// One slot's worth on its way here.
struct Pull {
  std::shared_ptr<AskedRead> read;
  Stretch stretch{};
  std::optional<std::size_t> slot = std::nullopt;  // of the peer's ring, while it is not to be packed again
  std::array<std::uint64_t, kMaxAskLeaves> theirs{};
  std::array<std::uint64_t, kMaxAskLeaves> ours{};
  const std::byte* bytes = nullptr;                // packed, here
  std::unique_ptr<PackJob> job = nullptr;
  Duration busy{};                                 // of scattering
  std::list<Pull>::iterator at{};

  std::size_t leaves() const {
    return read->spec().integrity ? static_cast<std::size_t>(leaf_count(stretch.end - stretch.begin)) : 0;
  }
};

// A slot is asked for again only when its bytes have been fetched, or never will be: it returns by completion, not by
// time. Used by the engine's thread.
class Pulling {
 public:
  explicit Pulling(Packer& packer, std::shared_ptr<Pace> pace = nullptr) : packer_(packer), turns_(std::move(pace)) {}
  virtual ~Pulling() = default;
  Pulling(const Pulling&) = delete;
  Pulling& operator=(const Pulling&) = delete;

  // The peer keeps a ring of so many slots from now on.
  void open(std::size_t slots);

  void add(std::shared_ptr<AskedRead> read) { demand_.add(std::move(read)); }
  // Asks for as much as there are slots; true if anything.
  bool ask(Channel& channel);
  // When to ask() again for what the bandwidth cap has put off.
  Time put_off_until() { return turns_.put_off_until(); }
  // The answer to the oldest ask; throws ProtocolViolation if it is none.
  void packed(const PackAnswer& answer);
  // One bounded piece of scattering; true if there may be more to do at once.
  bool step();
  // The peer is gone: no ask is answered any more. What has been fetched, or is being, goes on.
  void abandon();

 protected:
  // The slot of `pull` is packed, and its read was entered: bring its bytes, and call fetched() or failed() once.
  virtual void fetch(Pull& pull) = 0;
  // The bytes given to fetched() were scattered, or will not be: their memory is free.
  virtual void release(Pull& pull) = 0;

  // `keeps_slot`: the bytes are read from the slot itself, which is free only after them.
  void fetched(Pull& pull, const std::byte* bytes, bool keeps_slot);
  // They will not come; the read ends by the transport's word.
  void failed(Pull& pull);

 private:
  PackJob::Step advance(Pull& pull);
  void land(Pull& pull);
  void free_slot(Pull& pull);
  void finish(Pull& pull);

  Packer& packer_;
  Turns turns_;
  Demand demand_{1};
  std::vector<std::size_t> slots_free_;
  std::list<Pull> pulls_;  // all that are under way; their addresses hold
  std::deque<Pull*> asked_;
  std::deque<Pull*> scattering_;
};

}  // namespace kvlink
