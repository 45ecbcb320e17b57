#include "datastates/write/host_fingerprints.hpp"

#include <algorithm>

#include "datastates/checksum/fingerprint.hpp"

namespace datastates {

void HostFingerprints::add(std::size_t source) {
    const std::uint64_t first = job_.plan().first_word(source);
    const std::byte* const memory = job_.buffers().host(source) + first;
    const std::uint64_t nbytes = job_.plan().source_nbytes(source) - first;
    fingerprint::prefetch(memory, nbytes);
    if (used_ + std::min(nbytes, fingerprint::kFew) > GuardedCopies::kGathered) finish();
    const auto read = [&](std::uint64_t offset, std::uint64_t bytes) {
        reads_.emplace_back(memory + offset, bytes);
        readers_.push_back(source);
        used_ += bytes;
    };
    sampled_.push_back({.source = source, .nbytes = nbytes, .at = used_});
    if (nbytes <= fingerprint::kFew) {
        read(0, nbytes);
        return;
    }
    for (std::uint64_t i = 0; i < fingerprint::kSamples; ++i) {
        const std::uint64_t offset = fingerprint::sample_offset(nbytes, i);
        read(offset, std::min(fingerprint::kWord, nbytes - offset));
    }
}

void HostFingerprints::finish() {
    if (sampled_.empty()) return;
    Witness& witness = job_.witness();
    const std::byte* const data = copies_.gather(
        reads_, [&](std::size_t i) { witness.lose(static_cast<std::int32_t>(readers_[i])); });
    for (const auto& [source, nbytes, at] : sampled_) {
        witness.set_before(source, nbytes <= fingerprint::kFew
                                       ? fingerprint::of(data + at, nbytes)
                                       : fingerprint::of_samples(nbytes, data + at));
    }
    sampled_.clear();
    reads_.clear();
    readers_.clear();
    used_ = 0;
}

}  // namespace datastates
