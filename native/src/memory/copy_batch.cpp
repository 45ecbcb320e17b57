#include "datastates/memory/copy_batch.hpp"

namespace datastates {

void CopyBatch::to_host(std::byte* to, cuda::DevicePointer from, std::uint64_t nbytes,
                        bool page_locked) {
    if (nbytes < gather::kMaxPiece && page_locked && engine_->reaches_host()) {
        gather::add(ranges_, reinterpret_cast<std::uint64_t>(to), from, nbytes);
    } else {
        engine_->to_host(to, from, nbytes, stream_);
    }
}

void CopyBatch::flush() {
    if (!ranges_.empty()) engine_->gather(ranges_, stream_, gather::kBlocksToHost);
    ranges_.clear();
}

}  // namespace datastates
