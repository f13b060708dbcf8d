#include "kernels.hpp"

#include <elf.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

#include "memory.hpp"

// Every access of the kernels' goes through this.
#define KVLINK_MEMORY(address, size) \
  reinterpret_cast<std::intptr_t>(fakecuda::bytes_at(static_cast<std::uint64_t>(address), size, size))
#include "kernels/host.hpp"

namespace fakecuda {
namespace {

using kvlink::kernels::Job;
using kvlink::kernels::LeafWork;

constexpr std::string_view kTypes = "kvlink_types_";
constexpr std::string_view kTo = "_to_";
constexpr std::string_view kMove = "kvlink_move_";

kvlink::Element element_of(const std::string& kernel_type) {
  for (std::size_t i = 0; i < kvlink::kElements.size(); ++i) {
    if (kvlink::kElements[i].kernel_type == kernel_type) return static_cast<kvlink::Element>(i);
  }
  throw IllegalAccess{};
}

std::optional<kvlink::kernels::Conversion> conversion_of(const Types& types) {
  if (types.source.empty()) return std::nullopt;
  return kvlink::kernels::Conversion{element_of(types.source), element_of(types.target)};
}

template <class Row>
void place(const Row*& table, std::size_t rows) {
  if (table != nullptr) {
    const auto address = reinterpret_cast<std::uintptr_t>(table);
    table = static_cast<const Row*>(bytes_at(address, rows * sizeof(Row), alignof(Row)));
  }
}

// Its tables are on the device, too.
Job on_host(Job job) {
  place(job.bases, 1);
  place(job.pieces, job.piece_count.value);
  place(job.source_scales, job.scale_columns);
  place(job.target_factors, job.scale_columns);
  return job;
}

void digest(const std::optional<kvlink::kernels::Conversion>& types, bool moves, LeafWork work, unsigned blocks,
            unsigned threads) {
  place(work.jobs, work.job_count);
  std::vector<Job> jobs;
  std::transform(work.jobs, work.jobs + work.job_count, std::back_inserter(jobs), on_host);
  work.jobs = jobs.data();
  constexpr std::size_t kDigestBytes = sizeof(std::uint64_t);
  work.digests = static_cast<std::uint64_t*>(
      bytes_at(reinterpret_cast<std::uintptr_t>(work.digests), work.leaves * kDigestBytes, kDigestBytes));
  const auto* conversion = types ? &*types : nullptr;
  if (moves) {
    kvlink::kernels::digest_on_host<true>(conversion, work, blocks, threads);
  } else {
    kvlink::kernels::digest_on_host<false>(conversion, work, blocks, threads);
  }
}

}  // namespace

bool read_types(const void* image, Types* types) {
  Elf64_Ehdr header;
  std::memcpy(&header, image, sizeof header);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_machine != EM_CUDA) return false;
  const auto end = std::max(header.e_shoff + std::uint64_t{header.e_shnum} * header.e_shentsize,
                            header.e_phoff + std::uint64_t{header.e_phnum} * header.e_phentsize);
  const std::string_view text(static_cast<const char*>(image), end);
  const auto at = text.find(kTypes);
  *types = {};
  if (at == std::string_view::npos) return true;
  const std::string_view name = text.substr(at + kTypes.size(), text.find('\0', at) - at - kTypes.size());
  const auto to = name.find(kTo);
  *types = {std::string(name.substr(0, to)), std::string(name.substr(to + kTo.size()))};
  return true;
}

bool has_kernel(const Types& types, const std::string& name) {
  if (name == "kvlink_digest") return types.source.empty();
  for (const char* known : {"kvlink_move_and_digest", "kvlink_move_1", "kvlink_move_2", "kvlink_move_4",
                            "kvlink_move_8", "kvlink_move_16"}) {
    if (name == known) return true;
  }
  return false;
}

std::function<void()> launch(const Types& types, const std::string& name, void** parameters, unsigned blocks,
                             unsigned threads) {
  const auto conversion = conversion_of(types);
  if (name.ends_with("digest")) {
    const LeafWork work = *static_cast<const LeafWork*>(parameters[0]);
    const bool moves = name != "kvlink_digest";
    return [=] { digest(conversion, moves, work, blocks, threads); };
  }
  const Job job = *static_cast<const Job*>(parameters[0]);
  const int elements = std::stoi(name.substr(kMove.size()));
  return [=] {
    kvlink::kernels::run_on_host(conversion ? &*conversion : nullptr, elements, on_host(job), blocks, threads);
  };
}

}  // namespace fakecuda
