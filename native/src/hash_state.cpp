#include "datastates/hash_state.hpp"

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>

#include "datastates/base/error.hpp"
#include "datastates/memory/guarded_copy.hpp"

namespace datastates {
namespace {

constexpr int kHost = -1;
// Chunks that a worker takes at a time.
constexpr std::size_t kTaken = 8;
// How long to sleep between looks at a kernel: a large GPU hashes some 200 MB meanwhile.
constexpr std::chrono::microseconds kPoll{50};

}  // namespace

HashState::HashState(const std::vector<std::uint64_t>& nbytes, const Buffers& sources) {
    sources.validate(nbytes, false);
    for (std::size_t i = 0; i < nbytes.size(); ++i) {
        first_chunk_.push_back(chunks_.size());
        if (nbytes[i] == 0) continue;
        if (sources.device[i] != kHost) {
            streams_.emplace(sources.device[i], sources.stream[i]);
            on_devices_.push_back({.device = sources.device[i],
                                   .address = sources.address[i],
                                   .nbytes = nbytes[i],
                                   .source = i});
        }
        auto& place = places_[sources.device[i]];
        for (std::uint64_t at = 0; at < nbytes[i]; at += hash::kChunk) {
            place.push_back(chunks_.size());
            chunks_.push_back({.address = sources.address[i] + at,
                               .nbytes = std::min<std::uint64_t>(hash::kChunk, nbytes[i] - at)});
        }
    }
    hashes_.resize(chunks_.size());
}

std::size_t HashState::tasks() const {
    const auto host = places_.find(kHost);
    return host == places_.end() ? 0 : (host->second.size() + kTaken - 1) / kTaken;
}

void HashState::launch(CopyEngines& engines) {
    for (const auto& [device, handle] : streams_) {
        const auto engine = engines.at(device);
        devices_.add(device, engine);
        devices_.add_producer(device, engine->record(reinterpret_cast<cuda::StreamHandle>(handle)));
    }
    cuda::Mapping known;
    for (const auto& [device, address, nbytes, source] : on_devices_) {
        if (!devices_.engine(device).has_memory(address, nbytes, known)) lost_.insert(source);
    }
    devices_.order_after_producers(&CopyEngine::hash_stream);
    for (auto& [device, numbers] : places_) {
        if (device == kHost) continue;
        std::erase_if(numbers, [&](std::size_t chunk) { return lost_.contains(source_of(chunk)); });
        if (numbers.empty()) continue;
        std::vector<hash::DeviceChunk> chunks;
        chunks.reserve(numbers.size());
        for (const std::size_t number : numbers) chunks.push_back(chunks_[number]);
        launched_.emplace(device, devices_.engine(device).hash(chunks));
    }
}

void HashState::hash_host() {
    try {
        hash_chunks();
    } catch (...) {
        const std::scoped_lock lock(mutex_);
        if (!failure_) failure_ = Error::current();
    }
    const std::scoped_lock lock(mutex_);
    if (--calls_ == 0) ended_.notify_all();
}

void HashState::hash_chunks() {
    const auto& numbers = places_.at(kHost);
    GuardedCopies guarded;
    std::vector<std::byte> copy(hash::kChunk);
    while (!stopped_.load(std::memory_order_acquire)) {
        const std::size_t first = next_.fetch_add(kTaken, std::memory_order_relaxed);
        const std::size_t end = std::min(first + kTaken, numbers.size());
        if (first >= end) break;
        for (std::size_t i = first; i < end; ++i) {
            const auto& [address, nbytes] = chunks_[numbers[i]];
            const auto* const from = reinterpret_cast<const std::byte*>(address);
            if (guarded.copy({.to = copy.data(), .from = from, .bytes = nbytes})) {
                hashes_[numbers[i]] = hash::of_chunk({copy.data(), nbytes});
                continue;
            }
            const std::scoped_lock lock(mutex_);
            lost_.insert(source_of(numbers[i]));
        }
    }
}

std::size_t HashState::source_of(std::size_t chunk) const {
    const auto after = std::ranges::upper_bound(first_chunk_, chunk);
    return static_cast<std::size_t>(after - first_chunk_.begin()) - 1;
}

bool HashState::wait(Deadline deadline) const {
    {
        std::unique_lock lock(mutex_);
        if (!wait_until(ended_, lock, deadline, [&] { return calls_ == 0; })) return false;
    }
    std::optional<Error> failure = failure_;  // told when no other device reads a source
    for (const auto& [device, hashes] : launched_) {
        try {
            while (!hashes.done()->passed()) {
                if (deadline && Clock::now() >= *deadline) return false;
                std::this_thread::sleep_for(kPoll);
            }
        } catch (const Error& error) {
            if (!failure) failure = error;
        }
    }
    if (failure) throw Error(*failure);
    return true;
}

void HashState::wait_done() const {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return calls_ == 0; });
    for (const auto& [device, hashes] : launched_) hashes.done()->synchronize();
}

std::vector<std::size_t> HashState::lost() const {
    const std::scoped_lock lock(mutex_);
    return {lost_.begin(), lost_.end()};
}

std::vector<std::byte> HashState::hashes() const {
    std::vector<hash::Hash> all = hashes_;
    for (const auto& [device, hashes] : launched_) {
        const auto& numbers = places_.at(device);
        for (std::size_t i = 0; i < numbers.size(); ++i) all[numbers[i]] = hashes.all()[i];
    }
    const auto bytes = std::as_bytes(std::span(all));
    return {bytes.begin(), bytes.end()};
}

}  // namespace datastates
