#include "datastates/memory/host_fingerprints.hpp"

#include <algorithm>

namespace datastates {

void HostFingerprints::add(std::size_t number, const std::byte* memory, std::uint64_t nbytes,
                           fingerprint::Words words) {
    const auto read = [&](std::uint64_t offset, std::uint64_t bytes) {
        reads_.emplace_back(memory + offset, bytes);
        readers_.push_back(number);
        used_ += bytes;
    };
    const auto add_part = [&](Part part, std::uint64_t needed) {
        if (used_ + needed > GuardedCopies::kGathered) finish();
        part.at = used_;
        parts_.push_back(part);
    };
    if (words == fingerprint::Words::all) {
        for (std::uint64_t at = 0; at < nbytes; at += GuardedCopies::kGathered) {
            const std::uint64_t length = std::min(GuardedCopies::kGathered, nbytes - at);
            add_part({.number = number, .nbytes = nbytes, .offset = at, .length = length}, length);
            read(at, length);
        }
        return;
    }
    fingerprint::prefetch(memory, nbytes);
    add_part({.number = number, .nbytes = nbytes, .offset = 0, .length = 0},
             fingerprint::kSamples * fingerprint::kWord);
    for (std::uint64_t i = 0; i < fingerprint::kSamples; ++i) {
        const std::uint64_t offset = fingerprint::sample_offset(nbytes, i);
        read(offset, std::min(fingerprint::kWord, nbytes - offset));
    }
}

void HostFingerprints::finish() {
    if (parts_.empty()) return;
    const std::byte* const data =
        copies_.gather(reads_, [&](std::size_t i) { lose_(readers_[i]); });
    for (const Part& part : parts_) {
        add_(part.number, part.length == 0 ? fingerprint::of_samples(part.nbytes, data + part.at)
                                           : fingerprint::whole(part.offset / fingerprint::kWord,
                                                                data + part.at, part.length));
    }
    parts_.clear();
    reads_.clear();
    readers_.clear();
    used_ = 0;
}

}  // namespace datastates
