#include "datastates/read/streams.hpp"

#include <optional>
#include <utility>

namespace datastates {

File* Streams::take(File& file) {
    if (free_count_ > 0) return free_[--free_count_];
    if (made_ == most_) return nullptr;
    if (++made_ == 1) return &file;
    std::optional<File> again = file.again();
    if (!again) {
        made_ = most_;
        return nullptr;
    }
    return opened_.emplace_back(std::make_unique<File>(std::move(*again))).get();
}

}  // namespace datastates
