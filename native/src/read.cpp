#include "read.hpp"

#include <utility>

#include "digest.hpp"

namespace kvlink {
namespace {

double seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

ActiveRead::ActiveRead(ReadSpec spec) : spec_(std::move(spec)) {
  if (spec_.integrity) ours_.resize(static_cast<std::size_t>(leaf_count(total())));
}

void ActiveRead::stop(Outcome outcome, std::string detail) {
  if (outcome_) return;
  outcome_ = outcome;
  stopped_at_ = Clock::now();
  detail_ = std::move(detail);
}

void ActiveRead::count_landed(std::int64_t bytes) {
  last_landed_ = Clock::now();
  bytes_moved_ += static_cast<std::uint64_t>(bytes);
}

bool ActiveRead::may_read_again(std::uint64_t leaf, std::uint32_t rereads) {
  bad_leaf_ = leaf;
  if (rereads == spec_.max_rereads) {
    ActiveRead::stop(Outcome::digest_mismatch, "leaf " + std::to_string(leaf) + " differed on each of " +
                                                   std::to_string(rereads + 1) + " reads");
    return false;
  }
  ++rereads_;
  return true;
}

Completion ActiveRead::completion() const {
  Completion end{.kind = CompletionKind::read, .op = spec_.op, .peer = spec_.peer, .attempt = spec_.attempt};
  end.outcome = outcome_.value_or(Outcome::ok);
  end.bytes_moved = bytes_moved_;
  if (end.outcome == Outcome::ok && spec_.integrity) end.root = digest_root(ours_);
  end.rereads = rereads_;
  end.bad_leaf = bad_leaf_;
  if (bytes_moved_ > 0) end.wire_seconds = seconds(last_landed_ - *first_asked_);
  end.verify_seconds = seconds(verify_time_);
  end.detail = detail_;
  return end;
}

}  // namespace kvlink
