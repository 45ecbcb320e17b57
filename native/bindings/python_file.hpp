#pragma once

#include <pybind11/pybind11.h>
#include <signal.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "datastates/io/handed_file.hpp"

namespace datastates::python {

/// A file whose bytes a Python object hands over, to threads of the core.
class PythonFile final : public HandedFile {
  public:
    /// `object` has a `name`, in bytes, a `best_piece` and a method `read_into(spans)`. It must
    /// outlive this. Needs the GIL, as nothing else does.
    explicit PythonFile(pybind11::handle object);

  private:
    void read(std::span<std::byte> memory, std::uint64_t offset) override;

    pybind11::handle object_;
    sigset_t signals_{};  // that the thread blocks which made this
};

/// Lets no thread of the core call Python once the interpreter ends, which waits for such calls.
void bind_python_end();

}  // namespace datastates::python
