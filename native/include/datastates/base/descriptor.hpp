#pragma once

namespace datastates {

/// A file descriptor that closes itself, and that a forked child does not keep: as long as the
/// child lived, a deleted file would keep its space, and a ring its memory. It is closed in the
/// child at the fork, as whoever uses it is left behind.
class FileDescriptor {
  public:
    FileDescriptor() = default;
    explicit FileDescriptor(int fd);
    FileDescriptor(FileDescriptor&& other) noexcept;
    FileDescriptor& operator=(FileDescriptor&& other) noexcept;
    FileDescriptor(const FileDescriptor&) = delete;
    FileDescriptor& operator=(const FileDescriptor&) = delete;
    ~FileDescriptor() { reset(); }

    int get() const { return fd_; }
    bool valid() const { return fd_ >= 0; }
    void reset();
    /// Leaves the closing to the caller.
    int release();

  private:
    struct Open;

    int fd_ = -1;
    // All that are open, as a list.
    FileDescriptor* next_ = nullptr;
    FileDescriptor* previous_ = nullptr;
};

}  // namespace datastates
