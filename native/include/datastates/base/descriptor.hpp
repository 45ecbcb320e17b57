#pragma once

namespace datastates {

/// Owns a file descriptor and closes it. A fork closes it in the child too, where no thread is left
/// to use it; otherwise a deleted file would keep its space, and a ring its memory, as long as the
/// child lives. Each object belongs to one thread at a time; different objects are independent.
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
    /// Closes the descriptor, if there is one.
    void reset() { static_cast<void>(close()); }
    /// As reset. Returns the errno that close(2) reports, 0 for success: some file systems tell
    /// only then that they could not take what was written.
    int close();
    /// Returns the descriptor without closing it; -1 if there is none.
    int release();

  private:
    struct Open;

    int fd_ = -1;
    // Links of the list of all open ones.
    FileDescriptor* next_ = nullptr;
    FileDescriptor* previous_ = nullptr;
};

}  // namespace datastates
