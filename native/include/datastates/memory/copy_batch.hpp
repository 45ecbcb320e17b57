#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "datastates/memory/copy_engine.hpp"
#include "datastates/memory/gather.hpp"

namespace datastates {

/// Enqueues the copies of one extent's pieces to the host on one stream. The gather kernel does the
/// small ones together; the driver does each larger one. Belongs to one thread. Throws Error
/// "cuda".
class CopyBatch {
  public:
    CopyBatch(CopyEngine& engine, cuda::StreamHandle stream) : engine_(&engine), stream_(stream) {}

    CopyEngine& engine() const { return *engine_; }
    cuda::StreamHandle stream() const { return stream_; }

    /// `page_locked`: `to` is page-locked, so the kernel can store to it.
    void to_host(std::byte* to, cuda::DevicePointer from, std::uint64_t nbytes, bool page_locked);
    /// Launches the kernel for the small copies. When it returns, all copies are on the stream.
    void flush();

  private:
    CopyEngine* engine_;
    cuda::StreamHandle stream_;
    std::vector<gather::Range> ranges_;
};

}  // namespace datastates
