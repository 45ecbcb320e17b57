#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "datastates/memory/copy_engine.hpp"
#include "datastates/memory/gather.hpp"

namespace datastates {

/// Copies of one extent's pieces to the host, enqueued on one stream: small ones together by the
/// gather kernel, larger ones each by the driver. Belongs to one thread.
class CopyBatch {
  public:
    CopyBatch(CopyEngine& engine, cuda::StreamHandle stream) : engine_(&engine), stream_(stream) {}

    CopyEngine& engine() const { return *engine_; }
    cuda::StreamHandle stream() const { return stream_; }

    /// `page_locked` says whether the kernel may be used for it.
    void to_host(std::byte* to, cuda::DevicePointer from, std::uint64_t nbytes, bool page_locked);
    /// Enqueues what the kernel is to do. Everything is on the stream when it returns.
    void flush();

  private:
    CopyEngine* engine_;
    cuda::StreamHandle stream_;
    std::vector<gather::Range> ranges_;
};

}  // namespace datastates
