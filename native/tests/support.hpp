#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "datastates/base/fault.hpp"
#include "datastates/executor.hpp"
#include "datastates/io/io_backend.hpp"

namespace support {

using Bytes = std::vector<std::byte>;

inline const std::filesystem::path kMemoryRoot = "/dev/shm";

struct Setup {
    const char* backend;
    bool direct;
    bool memory = false;  // files live in memory
};

/// A directory on a real file system (where direct I/O may work) or in memory, removed at the end.
class TempDir {
  public:
    explicit TempDir(const Setup& setup = {}) {
        const auto parent = setup.memory ? kMemoryRoot : std::filesystem::current_path();
        std::string name = (parent / "test-XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
        path_ = name;
    }
    ~TempDir() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    TempDir(const TempDir&) = delete;
    TempDir& operator=(const TempDir&) = delete;
    std::string operator/(const std::string& name) const { return (path_ / name).string(); }

  private:
    std::filesystem::path path_;
};

/// Milliseconds of a delay that `fault::clear` ends: far longer than any test needs.
constexpr long kHeld = 60'000;

/// Disarms all faults at the end of a scope.
struct FaultScope {
    FaultScope() = default;
    FaultScope(const FaultScope&) = delete;
    FaultScope& operator=(const FaultScope&) = delete;
    ~FaultScope() { datastates::fault::clear(); }
};

inline Bytes random_bytes(std::mt19937_64& random, std::size_t size) {
    Bytes bytes(size);
    std::size_t i = 0;
    for (; i + 8 <= size; i += 8) {
        const std::uint64_t word = random();
        std::memcpy(bytes.data() + i, &word, 8);
    }
    for (; i < size; ++i) bytes[i] = static_cast<std::byte>(random());
    return bytes;
}

// Reads all at once: byte by byte, this takes half of the time under sanitizers.
inline Bytes read_file(const std::string& path) {
    Bytes bytes(std::filesystem::file_size(path));
    std::ifstream stream(path, std::ios::binary);
    stream.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    bytes.resize(static_cast<std::size_t>(stream.gcount()));
    return bytes;
}

inline void write_file(const std::string& path, const Bytes& bytes) {
    std::ofstream stream(path, std::ios::binary);
    stream.write(reinterpret_cast<const char*>(bytes.data()),
                 static_cast<std::streamsize>(bytes.size()));
}

/// The bytes of all spans of a stage.
inline std::uint64_t bytes_of(const datastates::Timeline& timeline, datastates::Stage stage) {
    std::uint64_t bytes = 0;
    for (const datastates::Span& span : timeline.spans()) {
        if (span.stage == stage) bytes += span.bytes;
    }
    return bytes;
}

/// Drops a file from the page cache.
inline void drop_cache(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0 || ::fsync(fd) != 0 || ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0) {
        throw std::runtime_error("cannot drop the cache of " + path);
    }
    ::close(fd);
}

/// Page-aligned memory whose start can be moved off alignment.
class Aligned {
  public:
    explicit Aligned(std::size_t size, std::size_t shift = 0)
        : memory_(size + 8192), shift_(shift) {}
    std::byte* data() {
        const auto at = reinterpret_cast<std::uintptr_t>(memory_.data());
        return memory_.data() + ((4096 - (at % 4096)) % 4096) + shift_;
    }

  private:
    Bytes memory_;
    std::size_t shift_;
};

/// Stretches of runs at random places in sources, each with its own digest, and their columns.
struct RandomRuns {
    std::vector<datastates::DigestRuns> runs;
    std::vector<std::int32_t> source;
    std::vector<std::uint64_t> offset, length, run_length, after, step;
    std::vector<std::uint32_t> digest;

    /// Makes `count` stretches in a source that is not empty, with digests from `first` on.
    static RandomRuns make(std::mt19937_64& random, std::uint64_t nbytes, std::size_t count,
                           std::size_t first);
    void add(std::int32_t to, const RandomRuns& other);
    datastates::DigestRunsArrays arrays() const {
        return {.digests = runs.size(),
                .offset = offset,
                .length = length,
                .run_length = run_length,
                .after = after,
                .step = step,
                .digest = digest};
    }
};

inline RandomRuns RandomRuns::make(std::mt19937_64& random, std::uint64_t nbytes, std::size_t count,
                                   std::size_t first) {
    RandomRuns made;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t each = 1 + (random() % std::min<std::uint64_t>(nbytes, 5000));
        const std::uint64_t offset = random() % (nbytes - each + 1);
        const std::uint64_t number = 1 + (random() % ((nbytes - offset) / each));
        const std::uint64_t step = each + (random() % 1000);
        made.runs.push_back({.offset = offset,
                             .length = each * number,
                             .run_length = each,
                             .after = ((number - 1) * step) + (random() % 5000),
                             .step = step,
                             .digest = static_cast<std::uint32_t>(first + i)});
    }
    std::ranges::sort(made.runs, {}, &datastates::DigestRuns::offset);
    return made;
}

inline void RandomRuns::add(std::int32_t to, const RandomRuns& other) {
    for (const datastates::DigestRuns& run : other.runs) {
        runs.push_back(run);
        source.push_back(to);
        offset.push_back(run.offset);
        length.push_back(run.length);
        run_length.push_back(run.run_length);
        after.push_back(run.after);
        step.push_back(run.step);
        digest.push_back(run.digest);
    }
}

/// The digest that the runs contribute to, computed by its definition.
inline std::uint32_t digest_of(std::span<const datastates::DigestRuns> runs, std::size_t digest,
                               std::span<const std::byte> data) {
    std::uint32_t value = 0;
    for (const datastates::DigestRuns& run : runs) {
        if (run.digest != digest) continue;
        for (std::uint64_t k = 0; k < run.length / run.run_length; ++k) {
            const auto raw = datastates::crc32_raw(
                data.subspan(run.offset + (k * run.run_length), run.run_length));
            value ^= datastates::Crc32Shift(run.after - (k * run.step)).shift(raw);
        }
    }
    return value;
}

/// Sources one after the other in a file, eager ones first. Literal bytes lie between them, with a
/// place for the CRC behind each source.
struct WriteCase {
    std::vector<Bytes> sources;
    std::vector<std::uint8_t> eager;
    Bytes literal;
    std::vector<std::size_t> order;
    std::vector<std::uint64_t> source_at;  // file offset of each source
    std::vector<std::uint32_t> digests;    // the expected digests
    Bytes expected;
    std::shared_ptr<datastates::WritePlan> plan;

    datastates::Buffers buffers() const {
        datastates::Buffers result;
        for (const Bytes& source : sources) {
            result.address.push_back(reinterpret_cast<std::uint64_t>(source.data()));
            result.device.push_back(-1);
            result.stream.push_back(0);
            result.witness.push_back(1);
        }
        return result;
    }
    static WriteCase make(std::vector<Bytes> sources, std::vector<std::uint8_t> eager,
                          std::uint64_t block_bytes, std::uint64_t chunk_bytes,
                          std::mt19937_64& random);
    static WriteCase random(std::mt19937_64& random, std::uint64_t block_bytes);
};

inline WriteCase WriteCase::make(std::vector<Bytes> sources, std::vector<std::uint8_t> eager,
                                 std::uint64_t block_bytes, std::uint64_t chunk_bytes,
                                 std::mt19937_64& random) {
    WriteCase made;
    made.sources = std::move(sources);
    made.eager = std::move(eager);
    const std::size_t n = made.sources.size();
    std::vector<std::uint64_t> nbytes(n);
    for (std::size_t i = 0; i < n; ++i) nbytes[i] = made.sources[i].size();
    made.source_at.resize(n);
    for (const bool wanted : {true, false}) {
        for (std::size_t i = 0; i < n; ++i) {
            if ((made.eager[i] != 0) == wanted) made.order.push_back(i);
        }
    }
    std::vector<std::uint64_t> extent_offset, extent_length, extent_piece{0}, source_offset,
        piece_offset, piece_length, patch_extent, patch_offset, patch_after;
    std::vector<std::int32_t> piece_source, patch_source;
    std::uint64_t at = 0;
    const auto place = [&](std::int32_t source, std::uint64_t from, std::uint64_t length) {
        while (length > 0) {
            if (at % block_bytes == 0) {
                if (at > 0) extent_piece.push_back(piece_source.size());
                extent_offset.push_back(at);
                extent_length.push_back(0);
            }
            const std::uint64_t take = std::min(length, block_bytes - (at % block_bytes));
            piece_source.push_back(source);
            source_offset.push_back(from);
            piece_offset.push_back(at % block_bytes);
            piece_length.push_back(take);
            extent_length.back() += take;
            at += take;
            from += take;
            length -= take;
        }
    };
    const auto place_literal = [&](std::uint64_t length) {
        const Bytes bytes = random_bytes(random, length);
        const std::uint64_t from = made.literal.size();
        made.literal.insert(made.literal.end(), bytes.begin(), bytes.end());
        made.expected.insert(made.expected.end(), bytes.begin(), bytes.end());
        place(-1, from, length);
    };
    for (const std::size_t i : made.order) {
        place_literal(64 + ((64 - (at % 64)) % 64) + (random() % 2 == 0 ? 0 : random() % 8));
        made.source_at[i] = at;
        made.expected.insert(made.expected.end(), made.sources[i].begin(), made.sources[i].end());
        place(static_cast<std::int32_t>(i), 0, nbytes[i]);
        place_literal((64 - (at % 64)) % 64);
        const std::uint64_t where = at;
        place_literal(64);
        patch_extent.push_back(where / block_bytes);
        patch_offset.push_back(where % block_bytes);
        patch_source.push_back(static_cast<std::int32_t>(i));
        patch_after.push_back(0);
        std::uint32_t crc = 0;
        std::memcpy(&crc, made.expected.data() + where, sizeof crc);
        crc ^= datastates::crc32(0, made.sources[i]);
        std::memcpy(made.expected.data() + where, &crc, sizeof crc);
    }
    if (random() % 2 == 0) place_literal(random() % 5000);
    if (!extent_offset.empty()) extent_piece.push_back(piece_source.size());
    RandomRuns runs;
    for (std::size_t i = 0; i < n; ++i) {
        if (nbytes[i] == 0) continue;
        const auto some = RandomRuns::make(random, nbytes[i], random() % 4, made.digests.size());
        for (std::size_t k = 0; k < some.runs.size(); ++k) {
            made.digests.push_back(digest_of(some.runs, made.digests.size(), made.sources[i]));
        }
        runs.add(static_cast<std::int32_t>(i), some);
    }
    made.plan = std::make_shared<datastates::WritePlan>(
        datastates::WritePlanArrays{.source_nbytes = nbytes,
                                    .chunk_bytes = chunk_bytes,
                                    .literal = made.literal,
                                    .extent_offset = extent_offset,
                                    .extent_length = extent_length,
                                    .extent_piece = extent_piece,
                                    .piece_source = piece_source,
                                    .piece_source_offset = source_offset,
                                    .piece_extent_offset = piece_offset,
                                    .piece_length = piece_length,
                                    .patch_extent = patch_extent,
                                    .patch_offset = patch_offset,
                                    .patch_source = patch_source,
                                    .patch_after = patch_after,
                                    .eager = made.eager,
                                    .runs_source = runs.source,
                                    .runs = runs.arrays()});
    return made;
}

inline WriteCase WriteCase::random(std::mt19937_64& random, std::uint64_t block_bytes) {
    static constexpr std::size_t kSizes[] = {0, 1, 7, 8, 512, 4096, 5000, 70000, 300001};
    std::vector<Bytes> sources(1 + (random() % 12));
    std::vector<std::uint8_t> eager(sources.size());
    for (std::size_t i = 0; i < sources.size(); ++i) {
        sources[i] = random_bytes(random, kSizes[random() % std::size(kSizes)]);
        eager[i] = static_cast<std::uint8_t>(random() % 3 == 0);
    }
    return make(std::move(sources), std::move(eager), block_bytes, 1 + (random() % 100000), random);
}

/// A plan of which each span and each piece is one stretch. No extent is shared unless that is
/// given.
inline std::shared_ptr<datastates::ReadPlan> plan_of_single(datastates::ReadPlanArrays arrays) {
    const std::vector<std::uint64_t> ones(
        std::max(arrays.span_offset.size(), arrays.piece_dest.size()), 1);
    const std::vector<std::uint8_t> none(arrays.extent_offset.size());
    if (arrays.extent_shared.empty()) arrays.extent_shared = none;
    arrays.span_count = std::span(ones).first(arrays.span_offset.size());
    arrays.span_step = arrays.span_length;
    arrays.piece_count = std::span(ones).first(arrays.piece_dest.size());
    arrays.piece_extent_step = arrays.piece_dest_step = arrays.piece_length;
    return std::make_shared<datastates::ReadPlan>(arrays);
}

/// Reads back the sources of a written case, each in extents of at most `extent_bytes`.
struct ReadCase {
    std::vector<Aligned> dests;
    std::vector<std::uint64_t> nbytes;
    std::shared_ptr<datastates::ReadPlan> plan;

    datastates::Buffers buffers() {
        datastates::Buffers result;
        for (Aligned& dest : dests) {
            result.address.push_back(reinterpret_cast<std::uint64_t>(dest.data()));
            result.device.push_back(-1);
            result.stream.push_back(0);
        }
        return result;
    }
    static ReadCase make(const WriteCase& written, std::uint64_t extent_bytes, std::size_t shift,
                         bool shared = false);
};

inline ReadCase ReadCase::make(const WriteCase& written, std::uint64_t extent_bytes,
                               std::size_t shift, bool shared) {
    ReadCase made;
    std::vector<std::uint64_t> extent_offset, extent_length, index{0}, zero, dest_offset;
    std::vector<std::int32_t> dest;
    std::vector<std::uint32_t> crc;
    for (const Bytes& source : written.sources) {
        made.dests.emplace_back(source.size(), shift);
        made.nbytes.push_back(source.size());
    }
    for (const std::size_t i : written.order) {
        const Bytes& source = written.sources[i];
        for (std::uint64_t at = 0; at < source.size(); at += extent_bytes) {
            const std::uint64_t length = std::min<std::uint64_t>(extent_bytes, source.size() - at);
            extent_offset.push_back(written.source_at[i] + at);
            extent_length.push_back(length);
            index.push_back(extent_offset.size());
            zero.push_back(0);
            dest.push_back(static_cast<std::int32_t>(i));
            dest_offset.push_back(at);
            crc.push_back(datastates::crc32(0, std::span(source).subspan(at, length)));
        }
    }
    const std::vector<std::uint8_t> extent_shared(extent_offset.size(), shared ? 1 : 0);
    made.plan = plan_of_single(datastates::ReadPlanArrays{.dest_nbytes = made.nbytes,
                                                          .extent_offset = extent_offset,
                                                          .extent_length = extent_length,
                                                          .extent_shared = extent_shared,
                                                          .extent_span = index,
                                                          .span_offset = zero,
                                                          .span_length = extent_length,
                                                          .extent_piece = index,
                                                          .piece_dest = dest,
                                                          .piece_dest_offset = dest_offset,
                                                          .piece_extent_offset = zero,
                                                          .piece_length = extent_length,
                                                          .extent_check = index,
                                                          .check_offset = zero,
                                                          .check_length = extent_length,
                                                          .check_crc = crc,
                                                          .check_record = dest});
    return made;
}

/// Both backends, direct and buffered, and files in memory. Where the machine has no io_uring or no
/// tmpfs, it leaves them out and says so.
inline std::vector<Setup> setups() {
    static const bool uring = [] {
        try {
            datastates::make_backend("io_uring", 1, 1);
            return true;
        } catch (const datastates::Error& error) {
            std::cout << "SKIPPED: everything with io_uring: " << error.what() << "\n"
                      << std::flush;
            return false;
        }
    }();
    static const bool tmpfs = [] {
        try {
            const TempDir dir({.backend = "", .direct = false, .memory = true});
            if (datastates::DescriptorFile::create(dir / "f", true).traits().in_memory) return true;
        } catch (const std::runtime_error&) {
            // Reported below.
        }
        std::cout << "SKIPPED: everything with files in memory\n" << std::flush;
        return false;
    }();
    std::vector<Setup> result = {{"pwrite", true}, {"pwrite", false}};
    if (uring) result.insert(result.begin(), {{"io_uring", true}, {"io_uring", false}});
    if (tmpfs) result.push_back({uring ? "io_uring" : "pwrite", true, true});
    return result;
}

/// A number of this process's status, in kilobytes where it is memory.
inline long process_status(const std::string& field) {
    std::ifstream status("/proc/self/status");
    for (std::string word; status >> word;) {
        if (word != field + ":") continue;
        status >> word;
        return std::stol(word);
    }
    throw std::runtime_error("no " + field + " in /proc/self/status");
}

inline std::shared_ptr<datastates::Executor> make_executor(const Setup& setup, std::size_t blocks,
                                                           std::size_t block_bytes,
                                                           std::uint64_t device_cache_bytes = 0,
                                                           unsigned workers = 4) {
    return datastates::Executor::make({.cache_bytes = blocks * block_bytes,
                                       .block_bytes = block_bytes,
                                       .device_cache_bytes = device_cache_bytes,
                                       .queue_depth = 4,
                                       .backend = setup.backend,
                                       .direct = setup.direct,
                                       .io_threads = 3,
                                       .workers = workers});
}

}  // namespace support
