#include "datastates/read/storage_reads.hpp"

#include <algorithm>
#include <utility>

#include "datastates/base/error.hpp"
#include "datastates/read/extent_place.hpp"

namespace datastates {

void StorageReads::start(const std::shared_ptr<Reading>& reading) {
    const ReadPlan::Extent& extent = reading->extent();
    const File& file = reading->job().file();
    if (!reading->block) {
        const std::uint64_t alignment = file.traits().offset_alignment;
        const std::uint64_t whole =
            file.direct() ? extent.length / alignment * alignment : extent.length;
        const std::uint64_t rest = extent.length - whole;
        // The rest is less than a page and is read through the page cache.
        submit(reading, reading->data, extent.offset, whole, whole);
        if (rest != 0) submit(reading, reading->data + whole, extent.offset + whole, rest, rest);
        return;
    }
    const auto [begin, end] = widened(extent, file);
    std::byte* const memory = reading->data;
    reading->data = memory + (extent.offset - begin);
    submit(reading, memory, begin, end - begin, extent.offset + extent.length - begin);
}

void StorageReads::submit(const std::shared_ptr<Reading>& reading, std::byte* buffer,
                          std::uint64_t offset, std::size_t length, std::size_t required) {
    const std::size_t most = reading->job().file().traits().best_piece;
    for (; length > most; length -= most, buffer += most, offset += most, required -= most) {
        submit_piece(reading, buffer, offset, most, most);
    }
    submit_piece(reading, buffer, offset, length, required);
}

void StorageReads::submit_piece(const std::shared_ptr<Reading>& reading, std::byte* buffer,
                                std::uint64_t offset, std::size_t length, std::size_t required) {
    ReadRun& run = *reading->run;
    const IoRequest request{.kind = IoKind::read,
                            .file = &run.job->file(),
                            .buffer = buffer,
                            .length = length,
                            .required = required,
                            .offset = offset,
                            .token = next_token_++,
                            .order = reading->index};
    const auto part = parts_.try_emplace(request.token).first;
    part->second = {.reading = reading, .request = request};
    try {
        backend_.submit(request);
    } catch (...) {
        parts_.erase(part);
        throw;
    }
    if (reading->parts++ == 0) ++run.under_way;
}

std::shared_ptr<Reading> StorageReads::take(const IoCompletion& completion) {
    const auto found = parts_.find(completion.token);
    Part part = std::move(found->second);
    parts_.erase(found);
    Reading& reading = *part.reading;
    reading.bytes_read += completion.transferred;
    try {
        if (!completion.ok()) throw io_error(completion, part.request);
    } catch (...) {
        reading.job().fail(reading.index, Error::current());
    }
    if (--reading.parts > 0) return nullptr;
    --reading.run->under_way;
    return std::move(part.reading);
}

}  // namespace datastates
