#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "datastates/base/timeline.hpp"
#include "datastates/io/descriptor_file.hpp"
#include "datastates/plan.hpp"

namespace datastates {

/// The file that a write makes, from its creation to its last byte. Owned by the WriteState, which
/// lets one thread after the other use it.
class NewFile {
  public:
    /// `plan` outlives this.
    explicit NewFile(const WritePlan& plan) : plan_(plan) {}

    /// Creates the file, which must not exist. Opens it if the plan has gaps.
    void create(const std::string& path, bool direct) {
        const auto open = plan_.has_gaps() ? DescriptorFile::reopen : DescriptorFile::create;
        file_ = std::make_unique<DescriptorFile>(open(path, direct));
    }
    /// Allocates space for what the plan writes. `by_mapping`: also maps a file that lives in
    /// memory, for stores. Returns early when `stopped`.
    void allocate(bool by_mapping, const std::atomic<bool>& stopped);
    /// Keeps the last extent's bytes beyond a multiple of 4096; `finish` writes them with the tail.
    void keep_residual(std::span<const std::byte> data) {
        residual_.assign(data.begin(), data.end());
    }
    /// Writes `tail` behind the last extent, where the file ends; syncs and closes it. Throws Error
    /// "io" where the file is then not as long as what was written.
    void finish(std::span<const std::byte> tail, Timeline& timeline);

    bool exists() const { return file_ != nullptr; }
    /// REQUIRES: it exists.
    DescriptorFile& file() { return *file_; }
    const DescriptorFile& file() const { return *file_; }

  private:
    bool allocate_memory(const std::atomic<bool>& stopped) const;

    const WritePlan& plan_;
    std::unique_ptr<DescriptorFile> file_;
    std::vector<std::byte> residual_;
    bool allocated_ = false;
};

}  // namespace datastates
