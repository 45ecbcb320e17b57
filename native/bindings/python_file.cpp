#include "python_file.hpp"

#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "bind.hpp"
#include "datastates/base/unmovable.hpp"

namespace py = pybind11;

namespace datastates::python {
namespace {

/// The calls of Python that threads of the core make. A mutex guards it.
class Upcalls {
  public:
    /// Those of this process. Never destroyed, as threads may end after static objects.
    static Upcalls& all() { return *current(); }
    /// In a forked child none is under way.
    static void begin_anew() { current() = new Upcalls; }

    /// False once the interpreter ends.
    bool enter() {
        const std::scoped_lock lock(mutex_);
        if (!closed_) ++running_;
        return !closed_;
    }
    void leave() {
        const std::scoped_lock lock(mutex_);
        --running_;
        left_.notify_all();
    }
    /// Refuses further calls, and waits for those under way.
    void close() {
        std::unique_lock lock(mutex_);
        closed_ = true;
        left_.wait(lock, [&] { return running_ == 0; });
    }

  private:
    static Upcalls*& current() {
        static auto* calls = new Upcalls;
        return calls;
    }

    std::mutex mutex_;
    std::condition_variable left_;
    std::size_t running_ = 0;
    bool closed_ = false;
};

/// What Python knows of a thread of the core. It lasts as long as the thread: stores keep
/// connections in threading.local. REQUIRES: made and used in an Upcall.
class KnownThread : Unmovable {
  public:
    KnownThread() : before_(PyGILState_Ensure()), state_(PyEval_SaveThread()) {}
    ~KnownThread() {
        Upcalls& calls = Upcalls::all();
        if (!calls.enter()) return;  // the interpreter has ended, or will free it
        PyEval_RestoreThread(state_);
        PyGILState_Release(before_);
        calls.leave();
    }
    void take_gil() { PyEval_RestoreThread(state_); }

  private:
    PyGILState_STATE before_;
    PyThreadState* state_;
};

/// Holds the GIL in a thread of the core, which then blocks only `signals`: programs that Python
/// starts inherit that.
class Upcall : Unmovable {
  public:
    /// Throws Error "io", about the object of that name, once the interpreter ends.
    Upcall(const std::string& name, const sigset_t& signals) : calls_(Upcalls::all()) {
        if (!calls_.enter()) {
            throw Error(ErrorCode::io, 0, "read", name, "read " + name + ": Python is ending");
        }
        thread_local KnownThread thread;
        ::pthread_sigmask(SIG_SETMASK, &signals, &before_);
        thread.take_gil();
    }
    ~Upcall() {
        PyEval_SaveThread();
        ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
        calls_.leave();
    }

  private:
    Upcalls& calls_;
    sigset_t before_{};
};

std::string encoded(const py::object& text) {
    auto bytes = py::reinterpret_steal<py::bytes>(PyUnicode_EncodeFSDefault(py::str(text).ptr()));
    if (!bytes) throw py::error_already_set();
    return bytes;
}

/// The error for what Python has raised: of a StorageError with its number, operation and name.
/// Where its text cannot be told, only its type is.
Error error_of(const py::error_already_set& raised, const std::string& name) {
    const py::object& value = raised.value();
    std::string told = "read " + name + ": ";
    told += reinterpret_cast<PyTypeObject*>(raised.type().ptr())->tp_name;
    try {
        if (py::isinstance(value, errors().attr("StorageError"))) {
            return {ErrorCode::io, value.attr("errno").cast<int>(),
                    encoded(value.attr("operation")), encoded(value.attr("filename")),
                    encoded(value)};
        }
        told += ": " + encoded(value);
    } catch (const std::exception&) {  // raised by its own code, or no text
    }
    return {ErrorCode::io, 0, "read", name, told};
}

}  // namespace

PythonFile::PythonFile(py::handle object)
    : HandedFile(object.attr("name").cast<std::string>(),
                 object.attr("best_piece").cast<std::size_t>()),
      object_(object) {
    ::pthread_sigmask(SIG_BLOCK, nullptr, &signals_);
}

void PythonFile::read(std::span<std::byte> memory, std::uint64_t offset) {
    const Upcall upcall(path(), signals_);
    const auto nbytes = static_cast<py::ssize_t>(memory.size());
    const auto view = py::memoryview::from_memory(static_cast<void*>(memory.data()), nbytes);
    std::optional<Error> failure;
    const auto attempt = [&](auto&& call) {
        try {
            call();
        } catch (const py::error_already_set& raised) {
            if (!failure) failure = error_of(raised, path());
        }
    };
    attempt([&] {
        py::list spans;
        spans.append(py::make_tuple(offset, view));
        object_.attr("read_into")(spans);
    });
    attempt([&] { view.attr("release")(); });  // whoever still has it finds it closed
    if (failure) throw Error(*failure);
}

void bind_python_end() {
    ::pthread_atfork(nullptr, nullptr, &Upcalls::begin_anew);
    py::module_::import("atexit").attr("register")(
        py::cpp_function([] { Upcalls::all().close(); }, py::call_guard<NoGil>()));
}

}  // namespace datastates::python
