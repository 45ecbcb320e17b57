#include "datastates/write/replica_digests.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "datastates/base/error.hpp"
#include "datastates/checksum/fingerprint.hpp"
#include "datastates/memory/guarded_copy.hpp"

namespace datastates {
namespace {

// A piece stays in the processor's cache between its copy and its fingerprint.
constexpr std::uint64_t kPiece = std::uint64_t{128} << 10;

}  // namespace

void ReplicaRanges::validate() const {
    const std::size_t n = nbytes.size();
    const bool agree = device.size() == n && stream.size() == n && position.size() == n &&
                       digest.size() == n && eager.size() == n;
    if (!agree || std::ranges::any_of(digest, [&](auto d) { return d >= digests; })) {
        throw Error::invalid("the columns of replicas disagree");
    }
}

ReplicaDigests::ReplicaDigests(Replicas memory)
    : ranges_(std::move(memory.ranges)),
      addresses_(std::move(memory.addresses)),
      sums_(ranges_ ? ranges_->digests : 0),
      lost_(sums_.size()) {
    if (!ranges_) return;
    if (addresses_.size() != ranges_->nbytes.size()) {
        throw Error::invalid("each range of a replica needs an address");
    }
    cut(true);
    eager_batches_ = batches_.size();
    cut(false);
    batches_.push_back(pieces_.size());
}

/// Cuts host memory into pieces, and these into batches that one call copies.
void ReplicaDigests::cut(bool eager) {
    std::size_t first = pieces_.size();
    std::uint64_t bytes = 0;
    const auto close = [&] {
        if (first < pieces_.size()) batches_.push_back(first);
        first = pieces_.size();
        bytes = 0;
    };
    for (std::size_t range = 0; range < addresses_.size(); ++range) {
        if (ranges_->device[range] >= 0 || (ranges_->eager[range] != 0) != eager) continue;
        for (std::uint64_t at = 0; at < ranges_->nbytes[range]; at += kPiece) {
            const std::uint64_t nbytes = std::min(kPiece, ranges_->nbytes[range] - at);
            if (pieces_.size() - first == GuardedCopies::kMost ||
                bytes + nbytes > GuardedCopies::kMostBytes) {
                close();
            }
            pieces_.push_back({.range = range, .offset = at, .nbytes = nbytes});
            bytes += nbytes;
        }
    }
    close();
}

std::vector<int> ReplicaDigests::devices() const {
    std::set<int> found;
    for (std::size_t i = 0; i < addresses_.size(); ++i) {
        if (ranges_->device[i] >= 0) found.insert(ranges_->device[i]);
    }
    return {found.begin(), found.end()};
}

void ReplicaDigests::begin(const JobDevices& devices,
                           const std::function<void(int, std::shared_ptr<Event>)>& launched) {
    struct Group {
        std::vector<fingerprint::DeviceWords> memory{};
        std::vector<std::size_t> ranges{};
    };
    std::map<std::pair<int, std::uint64_t>, Group> groups;
    for (std::size_t i = 0; i < addresses_.size(); ++i) {
        if (ranges_->device[i] < 0) continue;
        Group& group = groups[{ranges_->device[i], ranges_->stream[i]}];
        group.memory.push_back({.address = addresses_[i],
                                .nbytes = ranges_->nbytes[i],
                                .position = ranges_->position[i]});
        group.ranges.push_back(i);
    }
    for (auto& [place, group] : groups) {
        CopyEngine& engine = devices.engine(place.first);
        auto* stream = reinterpret_cast<cuda::StreamHandle>(place.second);
        engine.require_not_capturing(stream);
        launched_.push_back({.fingerprints = engine.digest(group.memory, stream),
                             .ranges = std::move(group.ranges)});
        launched(place.first, launched_.back().fingerprints.done());
    }
    for (std::size_t batch = 0; batch < eager_batches_; ++batch) read_batch(batch);
}

void ReplicaDigests::read(const std::atomic<bool>& stopped) {
    for (;;) {
        const std::size_t batch = next_.fetch_add(1, std::memory_order_relaxed);
        if (batch >= tasks() || stopped.load(std::memory_order_acquire)) return;
        read_batch(eager_batches_ + batch);
        read_.fetch_add(1, std::memory_order_acq_rel);
    }
}

void ReplicaDigests::read_batch(std::size_t batch) {
    const std::size_t first = batches_[batch];
    const std::size_t end = batches_[batch + 1];
    std::uint64_t bytes = 0;
    for (std::size_t i = first; i < end; ++i) bytes += pieces_[i].nbytes;
    std::vector<std::byte> copied(bytes);
    std::vector<HostCopy> copies;
    copies.reserve(end - first);
    std::byte* to = copied.data();
    for (std::size_t i = first; i < end; ++i) {
        copies.push_back({.to = to, .from = host(pieces_[i]), .bytes = pieces_[i].nbytes});
        to += pieces_[i].nbytes;
    }
    GuardedCopies guarded;
    guarded.copy(copies, [&](std::size_t i) {
        lost_[ranges_->digest[pieces_[first + i].range]].store(true, std::memory_order_relaxed);
    });
    for (std::size_t i = first; i < end; ++i) {
        const auto& [range, offset, nbytes] = pieces_[i];
        sums_[ranges_->digest[range]].fetch_add(
            fingerprint::whole(ranges_->position[range] + (offset / fingerprint::kWord),
                               copies[i - first].to, nbytes),
            std::memory_order_relaxed);
    }
}

bool ReplicaDigests::passed() const {
    return std::ranges::all_of(
        launched_, [](const Launched& one) { return one.fingerprints.done()->passed(); });
}

std::vector<std::uint64_t> ReplicaDigests::digests() const {
    std::vector<std::uint64_t> result(sums_.begin(), sums_.end());
    for (const auto& [fingerprints, ranges] : launched_) {
        for (std::size_t i = 0; i < ranges.size(); ++i) {
            result[ranges_->digest[ranges[i]]] += fingerprints.at(i);
        }
    }
    return result;
}

std::vector<std::uint32_t> ReplicaDigests::lost() const {
    std::vector<std::uint32_t> result;
    for (std::size_t i = 0; i < lost_.size(); ++i) {
        if (lost_[i]) result.push_back(static_cast<std::uint32_t>(i));
    }
    return result;
}

}  // namespace datastates
