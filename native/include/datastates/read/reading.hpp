#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>

#include "datastates/base/timeline.hpp"
#include "datastates/memory/host_cache.hpp"
#include "datastates/read/extent_read.hpp"
#include "datastates/read/read_state.hpp"
#include "datastates/read/streams.hpp"

/// What the reader knows of its jobs and of their extents under way.
namespace datastates {

/// A job, queued or begun.
struct ReadRun {
    std::shared_ptr<ReadState> job;
    Streams streams;            // for shared extents that are not in the page cache
    std::size_t next = 0;       // the extents before it have begun
    std::size_t under_way = 0;  // extents that have begun and have not ended
    ReadStats stats{};

    bool begun() const { return next == job->plan().extents().size() || job->settled(next); }
    bool ended() const { return begun() && under_way == 0; }
};
/// Lists, so that elements move from one to the next without allocating memory.
using ReadRuns = std::list<ReadRun>;

/// An extent under way. It has two parts if only one of them can use direct I/O.
struct Reading {
    ReadRun* run;
    std::size_t index;             // in the job's plan
    std::shared_ptr<Block> block;  // none: read in place. Other extents may share it.
    std::byte* data;               // the place of the extent's first byte
    std::uint32_t track;
    Clock::time_point begin;
    unsigned parts = 0;
    std::uint64_t bytes_read = 0;
    DescriptorFile* from = nullptr;  // where a worker reads it, through the page cache
    bool streamed = false;           // `from` is one of the run's streams
    Finished finished{};

    ReadState& job() const { return *run->job; }
    const ReadPlan::Extent& extent() const { return job().plan().extents()[index]; }
};
using Readings = std::list<std::shared_ptr<Reading>>;

}  // namespace datastates
