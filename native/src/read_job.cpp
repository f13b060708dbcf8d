#include "read_job.hpp"

#include <algorithm>
#include <utility>

#include "digest.hpp"

namespace kvlink {

ReadJob::ReadJob(ReadSpec spec)
    : ActiveRead(std::move(spec)),
      chunk_bytes_(std::int64_t{spec_.chunk_leaves} * kLeafBytes),
      chunks_(kChunksUnderWay) {
  for (Chunk& chunk : chunks_) {
    chunk.job = this;
    free_.push_back(&chunk);
  }
  theirs_.reserve(ours_.size());
}

// A chunk that is to be read again goes first: later chunks may be waiting for its slot.
bool ReadJob::begin_chunk() {
  if (!again_.empty()) {
    posting_ = again_.front();
    again_.pop_front();
  } else if (started_ < total() && !free_.empty()) {
    posting_ = free_.back();
    free_.pop_back();
    posting_->begin = started_;
    posting_->end = std::min(started_ + chunk_bytes_, total());
    posting_->rereads = 0;
    posting_->differed = false;
    started_ = posting_->end;
  } else {
    return false;
  }
  posting_->posted = false;
  posting_->verified = 0;
  cursor_.emplace(*spec_.plan, posting_->begin, posting_->end);
  return true;
}

ReadJob::Chunk* ReadJob::next(Run& run) {
  if (stopped() || broken_) return nullptr;
  while (posting_ != nullptr || begin_chunk()) {
    Chunk& chunk = *posting_;
    if (cursor_->next(run)) {
      if (!first_asked_) first_asked_ = Clock::now();
      ++chunk.outstanding;
      ++outstanding_;
      return &chunk;
    }
    posting_ = nullptr;
    chunk.posted = true;
    if (chunk.outstanding == 0) landed(chunk);
  }
  return nullptr;
}

void ReadJob::ended(Chunk& chunk, bool good) {
  --outstanding_;
  --chunk.outstanding;
  broken_ = broken_ || !good;
  if (chunk.posted && chunk.outstanding == 0) landed(chunk);
}

void ReadJob::landed(Chunk& chunk) {
  if (broken_) return;  // it may be this chunk that lacks a get; the job is ending anyway
  count_landed(chunk.end - chunk.begin);
  if (spec_.integrity) {
    landed_.push_back(&chunk);
  } else {
    finished_ += chunk.end - chunk.begin;
    free_.push_back(&chunk);
  }
}

void ReadJob::add_leaves(std::uint64_t first, std::span<const std::uint64_t> digests) {
  if (!spec_.integrity || first != theirs_.size() || digests.size() > ours_.size() - theirs_.size()) {
    throw ProtocolViolation("leaves " + std::to_string(first) + " to " + std::to_string(first + digests.size()) +
                            " of attempt " + std::to_string(spec_.attempt) + ", which has " +
                            std::to_string(ours_.size()) + " and is at " + std::to_string(theirs_.size()));
  }
  theirs_.insert(theirs_.end(), digests.begin(), digests.end());
}

bool ReadJob::verify() {
  if (stopped()) return false;
  for (std::size_t i = 0; i < landed_.size(); ++i) {
    Chunk& chunk = *landed_[i];
    const std::int64_t last = leaf_count(chunk.end);
    const std::int64_t first = chunk.begin / kLeafBytes + chunk.verified;
    if (last > static_cast<std::int64_t>(theirs_.size())) continue;

    const std::int64_t count = std::min(kLeavesPerSlice, last - first);
    const auto own = std::span(ours_).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
    const Time begin = Clock::now();
    digest_leaves(*spec_.plan, Side::target, spec_.regions, first, own);
    verify_time_ += Clock::now() - begin;

    chunk.verified += count;
    chunk.differed = !std::equal(own.begin(), own.end(), theirs_.begin() + first);
    if (chunk.differed || first + count == last) {
      landed_.erase(landed_.begin() + static_cast<std::ptrdiff_t>(i));
      judge(chunk, first, own);
    }
    return true;
  }
  return false;
}

void ReadJob::judge(Chunk& chunk, std::int64_t first, std::span<const std::uint64_t> own) {
  if (!chunk.differed) {
    finished_ += chunk.end - chunk.begin;
    free_.push_back(&chunk);
    return;
  }
  const auto differing = std::mismatch(own.begin(), own.end(), theirs_.begin() + first).first - own.begin();
  if (!may_read_again(static_cast<std::uint64_t>(first + differing), chunk.rereads)) return;
  ++chunk.rereads;
  again_.push_back(&chunk);
}

bool ReadJob::over() const { return outstanding_ == 0 && (stopped() || finished_ == total()); }

}  // namespace kvlink
