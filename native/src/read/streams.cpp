#include "datastates/read/streams.hpp"

#include <optional>
#include <utility>

namespace datastates {

DescriptorFile* Streams::take(DescriptorFile& file) {
    if (free_count_ > 0) return free_[--free_count_];
    if (made_ == most_) return nullptr;
    if (++made_ == 1) return &file;
    std::optional<DescriptorFile> again = file.again();
    if (!again) {
        made_ = most_;
        return nullptr;
    }
    return opened_.emplace_back(std::make_unique<DescriptorFile>(std::move(*again))).get();
}

}  // namespace datastates
