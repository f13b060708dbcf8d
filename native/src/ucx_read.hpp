// What the peer wants to know of a read over UCX, whichever path it takes.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "asked_read.hpp"
#include "engine_core.hpp"
#include "read_job.hpp"

namespace kvlink {

class UcxPeer;
class UcxPulling;

class UcxRead {
 public:
  virtual ~UcxRead() = default;
  virtual std::uint32_t gets() const = 0;  // outstanding
  virtual bool started() const = 0;        // a get was ever posted
  virtual bool broken() const = 0;         // a get failed; the read waits to be stopped

  static UcxRead& of(ActiveRead& read);
};

// Gets from the source's blocks into the target's.
class UcxDirectRead final : public ReadJob, public UcxRead {
 public:
  UcxDirectRead(ReadSpec spec, std::shared_ptr<const LocalRegions> to, std::shared_ptr<const RemoteRegions> from)
      : ReadJob(std::move(spec)), local(std::move(to)), remote(std::move(from)) {}

  std::uint32_t gets() const override { return outstanding(); }
  bool started() const override { return ReadJob::started(); }
  bool broken() const override { return ReadJob::broken(); }

  const std::shared_ptr<const LocalRegions> local;
  const std::shared_ptr<const RemoteRegions> remote;
  UcxPeer* peer = nullptr;
};

// Gets of whole slots; see UcxPulling, which counts them.
class UcxPackedRead final : public AskedRead, public UcxRead {
 public:
  UcxPackedRead(ReadSpec spec, std::shared_ptr<const LocalRegions> to) : AskedRead(std::move(spec), std::move(to), 2) {}

  std::uint32_t gets() const override { return gets_; }
  bool started() const override { return started_; }
  bool broken() const override { return broken_; }

  UcxPulling* pulling = nullptr;

 private:
  friend class UcxPulling;
  std::uint32_t gets_ = 0;
  bool started_ = false;
  bool broken_ = false;
};

inline UcxRead& UcxRead::of(ActiveRead& read) {
  if (read.spec().packed) return static_cast<UcxPackedRead&>(read);
  return static_cast<UcxDirectRead&>(read);
}

}  // namespace kvlink
