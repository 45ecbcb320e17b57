#pragma once

#include <cstdlib>
#include <exception>
#include <functional>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

/// A small test framework: TEST(name) { ... CHECK(x); CHECK_EQ(a, b); CHECK_THROWS(code, x); } and
/// CHECK_MAIN() once in a file. With an argument it runs only the tests whose name contains it.
namespace check {

using Case = std::pair<std::string, std::function<void()>>;

inline std::vector<Case>& cases() {
    static std::vector<Case> all;
    return all;
}

struct Register {
    Register(const char* name, std::function<void()> body) {
        cases().emplace_back(name, std::move(body));
    }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
    throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <typename A, typename B>
void equal(const A& a, const B& b, const char* text, const char* file, int line) {
    if (a == b) return;
    std::ostringstream message;
    message << text << ": " << a << " != " << b;
    fail(file, line, message.str());
}

inline int run(int argc, char** argv) {
    int failures = 0;
    for (const auto& [name, body] : cases()) {
        if (argc > 1 && name.find(argv[1]) == std::string::npos) continue;
        std::cout << "[ RUN  ] " << name << "\n" << std::flush;
        try {
            body();
        } catch (const std::exception& error) {
            ++failures;
            std::cout << "[ FAIL ] " << name << ": " << error.what() << "\n" << std::flush;
        }
    }
    std::cout << (failures == 0 ? "all passed" : "FAILED") << "\n" << std::flush;
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace check

#define TEST(name)                                                    \
    static void test_##name();                                        \
    static const check::Register register_##name(#name, test_##name); \
    static void test_##name()
#define CHECK(x) \
    if (!(x)) check::fail(__FILE__, __LINE__, #x)
#define CHECK_EQ(a, b) check::equal(a, b, #a " == " #b, __FILE__, __LINE__)
#define CHECK_THROWS(expected, ...)                                                    \
    do {                                                                               \
        bool thrown = false;                                                           \
        try {                                                                          \
            __VA_ARGS__;                                                               \
        } catch (const datastates::Error& error) {                                     \
            thrown = true;                                                             \
            CHECK_EQ(to_string(error.code()), to_string(expected));                    \
        }                                                                              \
        if (!thrown) check::fail(__FILE__, __LINE__, "nothing thrown: " #__VA_ARGS__); \
    } while (false)
#define CHECK_MAIN() \
    int main(int argc, char** argv) { return check::run(argc, argv); }
